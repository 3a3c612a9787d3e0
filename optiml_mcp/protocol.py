"""What the SDK's server does not do by itself: exact error texts, one text for every unknown resource, an answer to
every line on stdin."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from mcp.server import MCPServer
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp.types import (
    INVALID_PARAMS,
    PARSE_ERROR,
    CallToolResult,
    ErrorData,
    InputRequiredResult,
    JSONRPCError,
    JSONRPCRequest,
)
from pydantic import AnyUrl, ValidationError

L = TypeVar("L")  # what the lifespan yields

LOG = logging.getLogger(__name__)
NOT_FOUND = "not_found: there is no such resource: resources/templates/list shows what can be read"


class RawArguments(FuncMetadata):
    """Hands a tool its arguments as they came; the tool reads them itself, strictly."""

    def validate_arguments(self, arguments_to_validate: dict[str, Any]) -> dict[str, Any]:
        """The raw arguments under the one name that every tool function takes."""
        return {"arguments": arguments_to_validate}


class StrictTool(Tool):
    """A tool whose anticipated errors reach the model as `code: sentence: what to do`, without a prefix."""

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> Any:
        """Run the tool; the SDK's wrapping of the error text is taken off again."""
        try:
            return await super().run(arguments, context, convert_result)
        except UnexpectedToolError as error:
            raise UnexpectedToolError(
                f"internal: {self.name} met a defect of ours: its traceback is in the server's log, please report it"
            ) from error
        except ToolError as error:
            raise error.__cause__ if isinstance(error.__cause__, ToolError) else error from None


class OptimlServer(MCPServer[L]):
    """The SDK's server with the exact texts and the stdio repairs of this package.

    Attributes:
        app: what the lifespan yielded, for handlers that get no context; None before it began.
        closed: set once the lifespan has ended; a signal handler waits for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app: L | None = None
        self.closed = anyio.Event()

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[L, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; an unknown name is answered with the known ones."""
        if self._tool_manager.get_tool(name) is None:
            known = [tool.name for tool in await self.list_tools()]
            raise ToolError(f"invalid_params: there is no tool {name[:60]!r}: the tools are {', '.join(known)}")
        return await super().call_tool(name, arguments, context)

    async def read_resource(
        self, uri: AnyUrl | str, context: Context[L, Any] | None = None
    ) -> Iterable[ReadResourceContents] | InputRequiredResult:
        """Read a resource; whatever is not there is answered with one text, so that nothing can be probed."""
        try:
            return await super().read_resource(uri, context)
        except ResourceNotFoundError:
            raise ResourceNotFoundError(NOT_FOUND) from None

    async def run_stdio_async(self) -> None:
        """Serve stdin and stdout, answering also the lines that are no JSON-RPC message."""
        async with stdio_server() as (lines, replies):
            await self._lowlevel_server.run(
                _Repaired(lines, replies), replies, self._lowlevel_server.create_initialization_options()
            )


class _Repaired:
    """The messages of stdin. The SDK drops a line that it cannot parse and leaves the caller waiting for ever;
    here a request with a lone surrogate goes on to its tool, which names the fault, and the rest is a parse error."""

    def __init__(self, lines: Any, replies: Any) -> None:
        self._lines = lines
        self._replies = replies

    @property
    def last_context(self) -> Any:
        """The context that the sender of the last message ran in."""
        return self._lines.last_context

    async def receive(self) -> SessionMessage | Exception:
        """The next message."""
        while True:
            item: SessionMessage | Exception = await self._lines.receive()
            if isinstance(item, SessionMessage):
                return item
            message = _reread(item)
            if isinstance(message, JSONRPCRequest):
                return SessionMessage(message)
            if message is not None:
                await self._replies.send(SessionMessage(message))

    async def aclose(self) -> None:
        """Close the stream."""
        await self._lines.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _reread(error: Exception) -> JSONRPCRequest | JSONRPCError | None:
    """What to make of a line that the transport refused; None for an empty line."""
    line = error.errors()[0]["input"] if isinstance(error, ValidationError) else None
    if isinstance(line, str) and not line.strip():
        return None
    try:
        data = json.loads(line) if isinstance(line, str) else line
    except (ValueError, RecursionError):
        data = None
    identifier = data.get("id") if isinstance(data, dict) else None
    if not isinstance(identifier, str | int) or isinstance(identifier, bool):
        identifier = None
    method = data.get("method") if isinstance(data, dict) else None
    if method == "tools/call" and identifier is not None and isinstance(data, dict):
        try:
            return JSONRPCRequest(jsonrpc="2.0", id=identifier, method=method, params=data.get("params"))
        except ValidationError:
            LOG.debug("a tools/call that is no request")
    code, what = (PARSE_ERROR, "it is not JSON") if data is None else (INVALID_PARAMS, "it is no JSON-RPC message")
    text = f"invalid_params: a line on stdin could not be read, {what} in UTF-8: send one JSON-RPC message a line"
    return JSONRPCError(jsonrpc="2.0", id=identifier, error=ErrorData(code=code, message=text))
