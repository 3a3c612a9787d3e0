"""Resources behind the answers, and the prompts.

Ids are checked against strict patterns before anything is looked up, and whatever is not there is answered with one
text (`protocol.NOT_FOUND`), so that a caller cannot probe for what exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from mcp import MCPError
from mcp.server.mcpserver import Context, UserMessage
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.types import (
    INVALID_PARAMS,
    Completion,
    CompletionArgument,
    CompletionContext,
    PromptReference,
    ResourceTemplateReference,
)

from optiml.codec import adapter_of, encode
from optiml.errors import InvalidInput, OptimlError
from optiml.records import Kernel, Problem
from optiml_mcp.protocol import NOT_FOUND, OptimlServer

if TYPE_CHECKING:
    from optiml.workbench import Workbench
    from optiml_mcp.server import App

Ctx = Context[Any, Any]
LONGEST_PAGE = 65_536  # characters
MOST_COMPLETIONS = 100  # the protocol allows no more
DEFAULT_LIMIT = str(LONGEST_PAGE)
_PROBLEM_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KERNEL_ID = re.compile(r"[0-9a-f]{16}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PAGED = "The text from character `offset` on, `limit` characters at most; a shorter page is the last."
JSON, TEXT, MARKDOWN = "application/json", "text/plain", "text/markdown"


def is_run_id(text: str) -> bool:
    """Whether a text has the form of a run id."""
    return _RUN_ID.fullmatch(text) is not None


def add_resources(server: OptimlServer[App]) -> None:
    """Register every resource of the contract."""

    @server.resource(
        "optiml://problems/{name}{?offset,limit}", title="A built-in problem", description=_PAGED, mime_type=JSON
    )
    async def problem(name: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        text = await _shown(ctx, _PROBLEM_NAME, name, lambda bench: _json(bench.problem(name)))
        return _page(text, offset, limit)

    @server.resource(
        "optiml://kernels/{kernel_id}{?offset,limit}", title="A kernel", description=_PAGED, mime_type=JSON
    )
    async def kernel(kernel_id: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        app: App = ctx.request_context.lifespan_context
        known = {"kernel_id": kernel_id, "verdict": app.verdicts.get(kernel_id)}
        text = await _shown(
            ctx, _KERNEL_ID, kernel_id, lambda bench: _json({**known, "kernel": bench.known_kernel(kernel_id)})
        )
        return _page(text, offset, limit)

    @server.resource(
        "optiml://kernels/{kernel_id}/ptx{?offset,limit}", title="PTX of a kernel", description=_PAGED, mime_type=TEXT
    )
    async def ptx(kernel_id: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        return _page(await _shown(ctx, _KERNEL_ID, kernel_id, lambda bench: bench.ptx(kernel_id)), offset, limit)

    @server.resource(
        "optiml://kernels/{kernel_id}/profile{?offset,limit}",
        title="Last profile of a kernel",
        description=_PAGED,
        mime_type=JSON,
    )
    async def profile(kernel_id: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        text = await _shown(ctx, _KERNEL_ID, kernel_id, lambda bench: _json(bench.last_profile(kernel_id)))
        if text == "null":
            raise ResourceNotFoundError(NOT_FOUND)
        return _page(text, offset, limit)

    @server.resource(
        "optiml://runs/{run_id}{?offset,limit}", title="Result of a search", description=_PAGED, mime_type=JSON
    )
    async def run(run_id: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        text = await _shown(ctx, _RUN_ID, run_id, lambda bench: _json(bench.search_result(run_id)))
        return _page(text, offset, limit)

    @server.resource(
        "optiml://runs/{run_id}/tree{?offset,limit}", title="Tree of a search", description=_PAGED, mime_type=JSON
    )
    async def tree(run_id: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        return _page(await _shown(ctx, _RUN_ID, run_id, lambda bench: _json(bench.tree(run_id))), offset, limit)

    @server.resource(
        "optiml://runs/{run_id}/report{?offset,limit}",
        title="Report of a search",
        description=_PAGED,
        mime_type=MARKDOWN,
    )
    async def report(run_id: str, ctx: Ctx, offset: str = "0", limit: str = DEFAULT_LIMIT) -> str:
        return _page(await _shown(ctx, _RUN_ID, run_id, lambda bench: bench.report(run_id)), offset, limit)

    @server.resource("optiml://schema/problem", title="Schema of a Problem", mime_type=JSON)
    async def problem_schema() -> str:
        """JSON schema of a Problem object."""
        return _json(adapter_of(Problem).json_schema())

    @server.resource("optiml://schema/kernel", title="Schema of a Kernel", mime_type=JSON)
    async def kernel_schema() -> str:
        """JSON schema of a Kernel object."""
        return _json(adapter_of(Kernel).json_schema())


async def _shown(ctx: Ctx, pattern: re.Pattern[str], name: str, show: Callable[[Workbench], str]) -> str:
    """The text that `show` makes, or the one answer for everything that is not there."""
    if pattern.fullmatch(name) is None:
        raise ResourceNotFoundError(NOT_FOUND)
    app: App = ctx.request_context.lifespan_context
    try:
        text: str = await app.call(show)
    except InvalidInput:
        raise ResourceNotFoundError(NOT_FOUND) from None
    except OptimlError as error:
        raise ResourceError(f"{error.code}: {error}") from error
    return text


def _json(value: Any) -> str:
    return json.dumps(encode(value), ensure_ascii=False, indent=1)


def _page(text: str, offset: str, limit: str) -> str:
    if not (offset.isascii() and offset.isdigit() and limit.isascii() and limit.isdigit() and len(offset + limit) < 24):
        raise MCPError(INVALID_PARAMS, "invalid_params: offset and limit are whole numbers: give digits only")
    begin = int(offset)
    return text[begin : begin + min(int(limit), LONGEST_PAGE)]


def add_prompts(server: OptimlServer[App]) -> None:
    """Register the two prompts."""

    @server.prompt(title="Optimise a CUDA kernel")
    def optimise_kernel(problem: str, kernel: str = "", evaluations: str = "40") -> list[UserMessage]:
        """Make a kernel faster and explain why it is: problem name, kernel source or kernel_id, kernels to try."""
        start = f"this kernel:\n\n{kernel}\n\n" if kernel else "the problem's own naive kernel. "
        return [
            UserMessage(
                f"Make a CUDA kernel for the OptiML problem {problem!r} faster, starting from {start}"
                "1. Check it with compile_verify; mend it until status is accepted. "
                "2. Read its bottleneck with profile_ncu. "
                f"3. Start run_mcts with budget.evaluations={evaluations}, call action=step until the status is "
                "finished, then action=result. "
                "4. Try one edit of your own on the best kernel: judge_patch, compile_verify, then profile_ncu with "
                "the best kernel as baseline. "
                "5. Report the fastest accepted kernel, the ratio and whether it is measured or modelled, and the "
                "metric that explains each step. Claim nothing that a tool did not say."
            )
        ]

    @server.prompt(title="Write a CUDA kernel")
    def write_kernel(intent: str) -> list[UserMessage]:
        """Write a verified kernel for an operation described in plain English."""
        return [
            UserMessage(
                f"Write a CUDA kernel for: {intent}\n"
                "1. Call generate_kernel with this intent; check what it assumed. "
                "2. If status is done, use the first accepted candidate. If it is needs_kernel, write the kernel from "
                "the template for the problem it drafted, or draft the problem yourself (optiml://schema/problem). "
                "3. Call compile_verify until status is accepted, mending what reason, first_mismatch or fault name. "
                "4. Show the kernel, its verdict and what was assumed."
            )
        ]


def add_completion(server: OptimlServer[App]) -> None:
    """Complete problem names and run ids in prompts and resource templates."""

    @server.completion()  # type: ignore[no-untyped-call, untyped-decorator]  # the SDK left it without types
    async def complete(
        reference: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion | None:
        if argument.name in ("problem", "name"):
            names = await anyio.to_thread.run_sync(_problem_names)
        elif argument.name == "run_id" and server.app is not None:
            names = await server.app.call(lambda bench: bench.run_ids())
        else:
            return None
        found = [name for name in names if name.startswith(argument.value)]
        return Completion(values=found[:MOST_COMPLETIONS], total=len(found), has_more=len(found) > MOST_COMPLETIONS)


def _problem_names() -> tuple[str, ...]:
    from optiml.problems.problem import builtin_names  # numpy comes with it

    return builtin_names()
