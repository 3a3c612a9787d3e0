"""The MCP server: five tools, the resources behind their answers, two prompts.

    server = build_server(lambda: Workbench(settings))

Every tool is async; the workbench blocks, so it works in threads that belong to the server. Answers are complete in
themselves (clients show a model only the structured part) and at most 8 KB.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase
from mcp.types import CallToolResult, TextContent, ToolAnnotations

from optiml.codec import digest, encode
from optiml.errors import Busy, InvalidInput, OptimlError, SetupError, WorkerDied, WorkerTimeout
from optiml.records import Generated, Judgement, NsightReport, Profile, SearchResult, Verdict
from optiml_mcp.arguments import (
    CompileVerify,
    GenerateKernel,
    JudgePatch,
    ProfileNcu,
    RunMcts,
    holds_many_values,
    optional_spec,
    read,
    schema_of,
    spec,
)
from optiml_mcp.background import Background
from optiml_mcp.jobs import Job, Jobs
from optiml_mcp.log import fields as log_fields
from optiml_mcp.protocol import OptimlServer, RawArguments, StrictTool
from optiml_mcp.replies import brief_profile, brief_result, fit, fit_text, size_of
from optiml_mcp.resources import add_completion, add_prompts, add_resources, is_run_id
from optiml_mcp.runs import Run, Runs

if TYPE_CHECKING:  # imported when the first tool needs it: start-up stays fast
    from optiml.workbench import Answer, Request, Workbench

T = TypeVar("T")

LOG = logging.getLogger(__name__)
FINISHING_S = 5.0
QUESTIONS_AT_ONCE = 8  # to the workbench; each has a thread and a connection to the store
QUESTION_LIMIT_S = 20.0
REPLIES_KEPT = 256  # answers from the store
FILE_KEYS = frozenset({"path", "npy"})  # of a kernel or an input that is read from a file: it may change
VERDICTS_KEPT = 256  # full verdicts that the kernel resources can show

INSTRUCTIONS = """\
OptiML verifies and speeds up CUDA kernels, with or without a GPU (an embedded PTX emulator stands in; its times are
modelled and say so). Usual order: generate_kernel (or your own kernel) -> compile_verify until status is accepted ->
profile_ncu for the bottleneck -> judge_patch before an edit -> compile_verify again. Or let run_mcts search: start,
then step until finished, then result. Follow next_action in each answer. status=pending means: call the same tool
with job_id. Only compile_verify decides whether a kernel is right; never trust a kernel that it did not accept.
Kernels seen before can be named by kernel_id, built-in problems by name; full texts are at optiml:// URIs."""


@dataclass(kw_only=True)
class App:
    """What lives as long as the server."""

    bench: Callable[[], Workbench]
    jobs: Jobs
    runs: Runs
    questions: Background
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)  # digest of a call -> its answer from the store
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # kernel_id -> the last full one

    async def call(self, function: Callable[[Workbench], Any]) -> Any:
        """A short question to the workbench, asked in a thread.

        Raises:
            Busy: there is no answer in time, so that no caller ever waits for one that does not come.
        """
        done = anyio.Event()
        future = self.questions.submit(lambda: function(self.bench()), on_done=done.set)
        try:
            with anyio.move_on_after(QUESTION_LIMIT_S):
                await done.wait()
        finally:
            future.cancel()  # of no effect once it has begun
        if not done.is_set():
            raise Busy(f"a short question took over {QUESTION_LIMIT_S:g} s on this busy machine: try again in a minute")
        return future.result()

    def remember(self, verdict: Verdict) -> None:
        """Keep a verdict for the kernel's resource."""
        self.verdicts.pop(verdict.kernel_id, None)
        self.verdicts[verdict.kernel_id] = verdict
        if len(self.verdicts) > VERDICTS_KEPT:
            del self.verdicts[next(iter(self.verdicts))]


Ctx = Context[App, Any]
Handler = Callable[[App, Any, Ctx], Awaitable[dict[str, Any]]]


class LazyBench:
    """The workbench, made when first asked for."""

    def __init__(self, factory: Callable[[], Workbench]) -> None:
        self._factory = factory
        self._lock = threading.Lock()
        self._bench: Workbench | None = None

    def __call__(self) -> Workbench:
        with self._lock:
            if self._bench is None:
                self._bench = self._factory()
            return self._bench

    def close(self) -> None:
        """Close it if there is one; its children die."""
        if self._bench is not None:
            self._bench.close()


def build_server(
    bench_factory: Callable[[], Workbench], *, allow_commands: bool = False, asks_models: bool = False
) -> OptimlServer[App]:
    """The server over a workbench that is made when the first tool needs it.

    Args:
        bench_factory: makes the workbench; called once, in a worker thread.
        allow_commands: whether that workbench runs its callers' programs; what the tools say of themselves follows.
        asks_models: whether it may ask language models beyond this machine; likewise.
    """

    @asynccontextmanager
    async def lifespan(_: MCPServer[App]) -> AsyncIterator[App]:
        bench = LazyBench(bench_factory)
        questions = Background(threads=QUESTIONS_AT_ONCE, name="question")
        app = App(bench=bench, jobs=Jobs(), runs=Runs(bench), questions=questions)
        server.app = app
        try:
            yield app
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                app.runs.close()
                app.jobs.close()
                app.questions.close()
                await anyio.to_thread.run_sync(bench.close, abandon_on_cancel=True)
            server.closed.set()

    server: OptimlServer[App] = OptimlServer(
        "optiml",
        title="OptiML",
        version=version("optiml"),
        instructions=INSTRUCTIONS,
        lifespan=lifespan,
        log_level="WARNING",
        tools=[
            _tool(_as_set_up(definition, allow_commands=allow_commands, asks_models=asks_models))
            for definition in TOOLS
        ],
    )
    add_resources(server)
    add_prompts(server)
    add_completion(server)
    return server


# --- the tools -------------------------------------------------------------------------------------------------------
async def compile_verify(app: App, args: CompileVerify, ctx: Ctx) -> dict[str, Any]:
    """Verdict on a kernel."""

    _require(args, "kernel", "problem")
    if args.job_id is not None:
        return await _answer(app, "compile_verify", args, None, ctx)
    kernel, problem = spec(args.kernel, "kernel"), spec(args.problem, "problem")
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("level", "axes", "dtype", "device", "arch", "seed")
    }
    return await _known(app, args, lambda bench: bench.known_verdict(kernel, problem, **options)) or await _answer(
        app, "compile_verify", args, lambda: app.bench().verify(kernel, problem, **options), ctx
    )


async def profile_ncu(app: App, args: ProfileNcu, ctx: Ctx) -> dict[str, Any]:
    """Profile of an accepted kernel, compared with a baseline where one is given; or of a report, or of a command."""
    if args.report is not None or args.command is not None:
        return await _answer(app, "profile_ncu", args, _profiled_elsewhere(app, args), ctx)
    for name in ("kernel_regex", "launch_skip", "launch_count"):
        if getattr(args, name) is not None:
            raise InvalidInput(f"profile_ncu: {name} goes with report or command only: leave it out")

    _require(args, "kernel", "problem")
    if args.job_id is not None:
        return await _answer(app, "profile_ncu", args, None, ctx)
    kernel, problem = spec(args.kernel, "kernel"), spec(args.problem, "problem")
    options: dict[str, Any] = {
        "baseline": optional_spec(args.baseline, "baseline"),
        "axes": args.axes,
        "metrics": None if args.metrics is None else tuple(args.metrics),
        "device": args.device,
    }
    return await _known(app, args, lambda bench: bench.known_profile(kernel, problem, **options)) or await _answer(
        app, "profile_ncu", args, lambda: app.bench().profile(kernel, problem, **options), ctx
    )


def _profiled_elsewhere(app: App, args: ProfileNcu) -> Callable[[], NsightReport]:
    """The work of a call that names a report or a command."""
    for name in ("kernel", "problem", "baseline", "axes", *(("report",) if args.command is not None else ())):
        if getattr(args, name) is not None:
            raise InvalidInput(f"profile_ncu: {name} does not go with {'command' if args.command else 'report'}")
    options: dict[str, Any] = {name: getattr(args, name) for name in ("kernel_regex", "launch_skip", "launch_count")}
    options["metrics"] = None if args.metrics is None else tuple(args.metrics)
    command, report = args.command, args.report
    if command is not None:
        return lambda: app.bench().profile_command(command, **options)
    assert report is not None
    return lambda: app.bench().profile_report(report, **options)


async def judge_patch(app: App, args: JudgePatch, ctx: Ctx) -> dict[str, Any]:
    """Opinion on an edit."""

    def work() -> Judgement:
        return app.bench().judge(
            spec(args.problem, "problem"),
            spec(args.before, "before"),
            spec(args.after, "after"),
            profile_id=args.profile,
            judge=args.judge,
        )

    _require(args, "problem", "before", "after")
    return await _answer(app, "judge_patch", args, work, ctx)


async def generate_kernel(app: App, args: GenerateKernel, ctx: Ctx) -> dict[str, Any]:
    """Kernels for an intent or a problem."""
    if args.job_id is None and args.intent is None and args.problem is None:
        raise InvalidInput("generate_kernel: give intent (plain English) or problem (a name or an object)")

    def work() -> Generated:
        return app.bench().generate(
            args.intent,
            optional_spec(args.problem, "problem"),
            axes=args.axes,
            dtype=args.dtype,
            count=args.count,
            generator=args.generator,
            verify=args.verify,
            device=args.device,
            arch=args.arch,
        )

    optional_spec(args.problem, "problem")
    return await _answer(app, "generate_kernel", args, work, ctx)


async def run_mcts(app: App, args: RunMcts, ctx: Ctx) -> dict[str, Any]:
    """Start, watch, read and cancel searches."""
    if args.action != "tell" and args.proposals is not None:
        raise InvalidInput(f"run_mcts: proposals go with action=tell, not with action={args.action}")
    if args.action == "start":
        return await _start(app, args)
    if args.action == "list":
        runs = await app.call(lambda bench: bench.runs())
        count = f"{len(runs)} search" + ("" if len(runs) == 1 else "es")
        text = "Call run_mcts with action=status and a run_id." if runs else "Start one with action=start."
        return fit({"summary": f"{count} known.", "next_action": text, "warnings": (), "runs": runs}, uri=None)
    if args.run_id is None:
        raise InvalidInput(f"run_mcts: action={args.action} needs run_id: action=list shows the known ones")
    if not is_run_id(args.run_id):
        raise InvalidInput(f"{args.run_id[:40]!r} is no run: action=list shows the known ones", code="unknown_run")
    run_id = args.run_id
    answers = None if args.action != "tell" else await _tell(app, run_id, args.proposals)
    result = await _result(app, run_id)
    if args.action == "cancel":
        return await _cancel(app, result)
    run = app.runs.find(run_id)
    if result.status == "running" and args.action != "result" and (run is None or _may_go_on(run, args.action)):
        run = app.runs.drive(run_id)  # after a restart the search goes on from its journal
    if args.action == "step" and run is not None and not run.ended:
        await app.runs.wait_for_news(run, seconds=args.max_wait_s, report=ctx.report_progress)
        result = await _result(app, run_id)
    if args.action == "result":
        return fit(brief_result(result), uri=f"optiml://runs/{result.run_id}")
    asked = result.status == "needs_proposals"
    requests = await app.call(lambda bench: bench.search_requests(run_id)) if asked else ()
    return _state(result, run, requests=requests, answers=answers)


async def _start(app: App, args: RunMcts) -> dict[str, Any]:
    if args.problem is None and args.intent is None:
        raise InvalidInput("run_mcts: action=start needs problem (a name or an object) or intent (plain English)")
    problem, kernel = optional_spec(args.problem, "problem"), optional_spec(args.kernel, "kernel")
    app.runs.check_room()
    run_id: str = await app.call(
        lambda bench: bench.start_search(
            problem,
            kernel,
            intent=args.intent,
            axes=args.axes,
            dtype=args.dtype,
            evaluations=args.budget.evaluations,
            seconds=args.budget.seconds,
            proposer=args.proposer,
            judge=args.judge,
            device=args.device,
            seed=args.seed,
            edits=None if args.edits is None else tuple(args.edits),
            write_to=args.write_to,
        )
    )
    app.runs.drive(run_id)
    until = "status is needs_proposals" if args.proposer == "agent" else "status is finished"
    return {
        "summary": f"Search {run_id} has started; at most {args.budget.evaluations} kernels will be tried.",
        "next_action": f"Call run_mcts with action=step and run_id={run_id} until {until}.",
        "warnings": [],
        "run_id": run_id,
        "status": "running",
        "evaluations": 0,
        "budget": args.budget.evaluations,
        "uri": f"optiml://runs/{run_id}",
    }


async def _cancel(app: App, result: SearchResult) -> dict[str, Any]:
    run = app.runs.find(result.run_id)
    if run is not None and not run.ended:
        await app.runs.stop(run, seconds=5)
        result = await _result(app, result.run_id)  # it may have come to its end just before
    if result.status in ("running", "needs_proposals"):
        await app.call(lambda bench: bench.cancel_search(result.run_id))
        result = await app.call(lambda bench: bench.search_result(result.run_id))
    state = _state(result, None)
    if state["status"] in ("running", "needs_proposals"):
        state["summary"] = "Another server carries this search out and ends it at its next step."
        state["next_action"] = f"Call run_mcts with action=result and run_id={result.run_id} in a while."
    return state


async def _tell(app: App, run_id: str, proposals: list[dict[str, Any]] | None) -> tuple[Answer, ...]:
    if proposals is None:
        raise InvalidInput(
            "run_mcts: action=tell needs proposals: a list of {request_id, kernel, rationale, expected}, or an empty "
            "list to end the search"
        )
    read_kernels = [
        {**item, "kernel": spec(item["kernel"], "kernel")} if item.get("kernel") else item for item in proposals
    ]
    answers: tuple[Answer, ...] = await app.call(lambda bench: bench.tell_search(run_id, read_kernels))
    return answers


async def _result(app: App, run_id: str) -> SearchResult:
    """What the driver of this server returned (it knows what was written where), else what the folder says."""
    run = app.runs.find(run_id)
    returned = None if run is None else run.returned()
    if returned is not None and returned.status not in ("running", "needs_proposals"):
        return returned
    result: SearchResult = await app.call(lambda bench: bench.search_result(run_id))
    if result.status == "finished" and run is not None and not run.ended:
        await app.runs.wait_for_end(run, seconds=FINISHING_S)  # it is writing the best kernel to its file
        return run.returned() or result
    return result


def _driven_elsewhere(run: Run) -> bool:
    return run.ended and not run.future.cancelled() and isinstance(run.future.exception(), Busy)


def _lacked_room(run: Run) -> bool:
    """Whether the run's folder could not be written; then what is in there still holds."""
    error = run.future.exception() if run.ended and not run.future.cancelled() else None
    return isinstance(error, SetupError) and error.code == Busy.code


def _may_go_on(run: Run, action: str) -> bool:
    """Whether a driver that has ended may be followed by another: it was told more, another server had the run, or
    somebody steps it again after its folder could not be written."""
    return run.ended and (run.error() is None or _driven_elsewhere(run) or (action == "step" and _lacked_room(run)))


def _state(
    result: SearchResult, run: Run | None, *, requests: Sequence[Request] = (), answers: Sequence[Answer] | None = None
) -> dict[str, Any]:
    """Where a search stands, from its folder and from who drives it."""
    run_id = result.run_id
    over = result.status in ("cancelled", "finished")
    error = None if run is None or over or _driven_elsewhere(run) else run.error()
    status = "failed" if error is not None else result.status
    progress = None if run is None else run.progress
    if status == "running":
        action = f"Call run_mcts with action=step and run_id={run_id} again, as long as status is running."
    elif status == "needs_proposals":
        action = (
            f"Answer with run_mcts action=tell, run_id={run_id}, proposals=[{{request_id, kernel: {{base: "
            "parent_kernel_id, diff: unified diff}, rationale, expected}], then action=step. proposals=[] ends the "
            "search with the final checks of the best kernel."
        )
    elif run is not None and error is not None and _lacked_room(run):
        action = f"Mend what the summary names, then call run_mcts with action=step and run_id={run_id}: it goes on."
    elif status == "failed":
        action = "Mend what the summary names, then start a new search."
    else:
        action = f"Call run_mcts with action=result and run_id={run_id}."
    known: dict[str, Any] = {
        "summary": error or result.summary,
        "next_action": action,
        "warnings": result.warnings,
        "run_id": run_id,
        "status": status,
        "evaluations": result.spent.evaluations,
        "best_speedup": None if result.speedup is None else result.speedup.median,
        "best_kernel_id": None if result.best is None else result.best.kernel_id,
        "stopped_because": error or result.stopped_because,
        "uri": f"optiml://runs/{run_id}",
    }
    if answers is not None:
        counted = Counter(item.outcome for item in answers)
        known["summary"] = (
            f"Of {len(answers)} proposals: {', '.join(f'{count} {name}' for name, count in counted.items())}."
            if answers
            else "No more proposals: the best kernel gets its final checks."
        )
        known["answers"] = answers
    if requests:
        known["requests"] = requests
        waiting = "1 kernel waits" if len(requests) == 1 else f"{len(requests)} kernels wait"
        known["summary"] = f"{waiting} for proposals. {known['summary']}"
    if progress is not None:
        known |= {
            "evaluations": max(result.spent.evaluations, progress.evaluations),
            "budget": progress.budget,
            "last": progress.last,
            "seconds": progress.seconds,
        }
    return fit(known, uri=f"optiml://runs/{run_id}")


# --- one call --------------------------------------------------------------------------------------------------------
def _require(args: Any, *names: str) -> None:
    """Refuse a call without its kernels or problem, unless it goes on with a job."""
    if args.job_id is None:
        for name in names:
            spec(getattr(args, name), name)


async def _known(app: App, args: Any, look_up: Callable[[Workbench], Any]) -> dict[str, Any] | None:
    """The answer that the store holds, without waiting behind the calls that work; None where there is none.

    An answer that was looked up once is kept as it was sent: what it depends on stands in the arguments, unless they
    name a file.
    """
    call = await _identity(args)
    if call in app.replies:
        return app.replies[call]
    record = await app.call(look_up)
    if record is None:
        return None
    reply = _complete(app, record)
    if not _names_a_file(encode(args)):
        app.replies[call] = reply
        if len(app.replies) > REPLIES_KEPT:
            del app.replies[next(iter(app.replies))]
    return reply


async def _identity(args: Any) -> str:
    """One text for all calls that ask for the same, however long they wait."""
    asked = [type(args).__name__, dataclasses.replace(args, max_wait_s=0)]
    return await _apart(vars(args), lambda: digest(asked))


async def _apart(arguments: Mapping[str, Any], work: Callable[[], T]) -> T:
    """What to do with arguments: at once, or in a thread if there are so many that others would have to wait."""
    return await anyio.to_thread.run_sync(work) if holds_many_values(arguments) else work()


def _names_a_file(value: Any) -> bool:
    if isinstance(value, dict):
        return not FILE_KEYS.isdisjoint(value) or any(map(_names_a_file, value.values()))
    return isinstance(value, list) and any(map(_names_a_file, value))


async def _answer(app: App, tool: str, args: Any, work: Callable[[], Any] | None, ctx: Ctx) -> dict[str, Any]:
    """Start the work or find its job, wait as long as allowed, answer with the record or with `pending`."""
    if args.job_id is not None or work is None:
        job = app.jobs.find(args.job_id, tool)
    else:
        job = app.jobs.start(tool, await _identity(args), work)
    if not await app.jobs.wait(job, seconds=args.max_wait_s, report=ctx.report_progress):
        return _pending(job)
    return _complete(app, app.jobs.outcome(job))


def _complete(app: App, record: Any) -> dict[str, Any]:
    for verdict in _verdicts_in(record):
        app.remember(verdict)
    return fit(brief_profile(record) if isinstance(record, Profile) else encode(record), uri=_uri_of(record))


def _pending(job: Job) -> dict[str, Any]:
    return {
        "status": "pending",
        "job_id": job.job_id,
        "summary": f"{job.tool} is still running.",
        "next_action": f"Call {job.tool} again with job_id={job.job_id}.",
        "warnings": [],
    }


def _verdicts_in(record: Any) -> list[Verdict]:
    if isinstance(record, Generated):
        return [item.verdict for item in record.candidates if item.verdict is not None]
    return [record] if isinstance(record, Verdict) else []


def _uri_of(record: Any) -> str | None:
    if isinstance(record, Verdict):
        return record.uri or None
    return (record.report_uri or None) if isinstance(record, Profile) else None


# --- what the SDK is told --------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Definition:
    """One tool as published."""

    name: str
    title: str
    description: str
    arguments: type[Any]
    answer: Mapping[str, str]  # field -> JSON type, beside the three that every answer has
    handler: Handler
    annotations: ToolAnnotations


# Four tools only answer: what they keep is a cache of their own. A search writes its folder, and with write_to a file
# that may exist already. No tool reaches beyond this machine. What a user sets up may change that: see `_as_set_up`.
ANSWERS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
SEARCHES = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False)


TOOLS = (
    Definition(
        name="compile_verify",
        title="Compile and verify a CUDA kernel",
        description=(
            "Compile a CUDA kernel and check it against a problem's reference, on given and hidden sizes. status is "
            "accepted, rejected (reason, detail, first_mismatch or fault say why) or unverified (this machine cannot "
            "tell). Wrong kernels are answers, not errors. The kernel runs in a sandbox, on a GPU or on the emulator."
        ),
        arguments=CompileVerify,
        answer={
            "kernel_id": "string",
            "status": "string",
            "reason": "string",
            "detail": "string",
            "levels": "array",
            "build": "object",
            "cases": "array",
            "first_mismatch": "object",
            "fault": "object",
            "device": "object",
            "cached": "boolean",
            "uri": "string",
        },
        handler=compile_verify,
        annotations=ANSWERS,
    ),
    Definition(
        name="profile_ncu",
        title="Profile a CUDA kernel",
        description=(
            "Time and counters of an accepted kernel under their Nsight Compute names, its bottleneck with evidence "
            "and advice, hot source lines, occupancy. time.source says measured (GPU) or modelled (emulator: counted "
            "instructions and bytes, modelled time). With baseline: comparison says faster, same or slower. A kernel "
            "that is not accepted is the error not_accepted."
        ),
        arguments=ProfileNcu,
        answer={
            "kernel_id": "string",
            "time": "object",
            "metrics": "object",
            "bottleneck": "object",
            "hot_lines": "array",
            "occupancy": "object",
            "speed_of_light": "object",
            "comparison": "object",
            "cached": "boolean",
            "report_uri": "string",
        },
        handler=profile_ncu,
        annotations=ANSWERS,
    ),
    Definition(
        name="judge_patch",
        title="Judge an edit to a CUDA kernel",
        description=(
            "Opinion on an edit before it is measured: what bounds the kernel, whether the edit addresses that, which "
            "metrics should move, risks, changes in registers and shared memory, and better edits as patches. It "
            "ranks what to try and never accepts a kernel: verify and profile the edit afterwards."
        ),
        arguments=JudgePatch,
        answer={
            "score": "number",
            "verdict": "string",
            "diagnosis": "object",
            "addresses_diagnosis": "boolean",
            "expected": "array",
            "risks": "array",
            "static_deltas": "object",
            "suggestions": "array",
        },
        handler=judge_patch,
        annotations=ANSWERS,
    ),
    Definition(
        name="generate_kernel",
        title="Generate CUDA kernels",
        description=(
            "Verified CUDA kernels for a problem or for plain English, from a catalogue, without a model. candidates "
            "lists accepted kernels first; assumed says what was read into the intent. status=needs_kernel: nothing "
            "fits, so write the kernel from the template given and send it to compile_verify."
        ),
        arguments=GenerateKernel,
        answer={
            "status": "string",
            "candidates": "array",
            "problem": "object",
            "assumed": "array",
            "template": "string",
        },
        handler=generate_kernel,
        annotations=ANSWERS,
    ),
    Definition(
        name="run_mcts",
        title="Search for a faster CUDA kernel",
        description=(
            "Monte Carlo tree search over edits of a kernel; every kernel on the way is verified. action=start "
            "answers at once with run_id and the search goes on in the background; action=step waits for news, repeat "
            "it until status is finished; action=result gives the best kernel, the path of edits and why each helped. "
            "With proposer=agent you write the edits: while status=needs_proposals, answer requests by action=tell "
            "with proposals (each answered queued, duplicate, stale or invalid), then step again; an empty list ends "
            "it. A search survives a restart of the server; cancelling a waiting call does not stop it, "
            "action=cancel does."
        ),
        arguments=RunMcts,
        answer={
            "run_id": "string",
            "status": "string",
            "evaluations": "integer",
            "budget": "integer",
            "best_speedup": "number",
            "best": "object",
            "baseline": "object",
            "speedup": "object",
            "path": "array",
            "explanation": "array",
            "stopped_because": "string",
            "runs": "array",
            "requests": "array",
            "answers": "array",
            "uri": "string",
        },
        handler=run_mcts,
        annotations=SEARCHES,
    ),
)


def _as_set_up(definition: Definition, *, allow_commands: bool, asks_models: bool) -> Definition:
    """The tool with hints that are true of this server."""
    if definition.name == "profile_ncu" and allow_commands:  # a program may do anything
        hints = ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        )
    elif definition.name in ("generate_kernel", "judge_patch", "run_mcts") and asks_models:
        hints = definition.annotations.model_copy(update={"open_world_hint": True})
    else:
        return definition
    return dataclasses.replace(definition, annotations=hints)


def _tool(definition: Definition) -> StrictTool:
    async def tool(arguments: dict[str, Any], ctx: Ctx) -> CallToolResult:
        begun = time.perf_counter()
        try:
            args = await _apart(arguments, lambda: read(definition.arguments, arguments, tool=definition.name))
            reply = await definition.handler(ctx.request_context.lifespan_context, args, ctx)
        except OptimlError as error:
            _log(definition.name, begun, outcome=error.code)
            raise ToolError(fit_text(f"{_told_code(error)}: {error}")) from error
        except anyio.get_cancelled_exc_class():
            _log(definition.name, begun, outcome="cancelled")
            raise
        _log(definition.name, begun, outcome="answered", reply=reply)
        return CallToolResult(
            content=[TextContent(type="text", text=json.dumps(reply, ensure_ascii=False))],
            structured_content=reply,
            _meta={"optiml/seconds": round(time.perf_counter() - begun, 4)},
        )

    return StrictTool(
        fn=tool,
        name=definition.name,
        title=definition.title,
        description=definition.description,
        parameters=schema_of(definition.arguments),
        fn_metadata=RawArguments(arg_model=ArgModelBase, output_schema=_answer_schema(definition.answer)),
        is_async=True,
        context_kwarg="ctx",
        annotations=definition.annotations,
    )


def _log(tool: str, begun: float, *, outcome: str, reply: Mapping[str, Any] | None = None) -> None:
    """One line for a call: what it was and how it went, nothing of what it carried."""
    if LOG.isEnabledFor(logging.INFO):
        known = {name: (reply or {}).get(name) for name in ("status", "kernel_id", "run_id", "job_id")}
        size = None if reply is None else size_of(reply)
        seconds = round(time.perf_counter() - begun, 4)
        LOG.info("call", extra=log_fields(tool=tool, outcome=outcome, seconds=seconds, bytes=size, **known))


def _told_code(error: OptimlError) -> str:
    """The code of the contract: what ended on our side for want of time or memory may go well at the next try."""
    return Busy.code if isinstance(error, WorkerDied | WorkerTimeout) else error.code


def _answer_schema(fields: Mapping[str, str]) -> dict[str, Any]:
    """Schema of an answer: three fields always there, the others null or absent where they do not apply."""
    return {
        "type": "object",
        "properties": {
            "summary": {"type": "string"},
            "next_action": {"type": "string"},
            "warnings": {"type": "array", "items": {"type": "string"}},
            **{name: {"type": [kind, "null"]} for name, kind in fields.items()},
            "cut": {"type": "array", "description": "What was left out to stay under 8 KB, and where it is."},
        },
        "required": ["summary", "next_action", "warnings"],
        "additionalProperties": True,
    }
