"""What the conformance suites ask of a server that is under test: tools, resources and prompts of fixed names.

They are mounted on the server that `build_server` makes, so that the transport, the token, the checks of hosts and
origins and the messages are those of the product. Nothing of this is part of the package.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import anyio
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, UserMessage
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata
from mcp.types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    ContentBlock,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    EmbeddedResource,
    ImageContent,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, Field

Ctx = Context[Any, Any]
STEP_S = 0.05


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


RED_PIXEL = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b"\x00\xff\x00\x00"))
    + _chunk(b"IEND", b"")
)
SILENCE = b"RIFF" + struct.pack("<I", 36) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
SILENCE += b"data" + struct.pack("<I", 0)
WIDE_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def text(words: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=words)])


def image() -> ImageContent:
    return ImageContent(type="image", data=base64.b64encode(RED_PIXEL).decode(), mime_type="image/png")


def embedded(uri: str, words: str, mime_type: str = "text/plain") -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=mime_type, text=words))


def form(message: str, **properties: Any) -> ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def sample(words: str, most_tokens: int = 100) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=words))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=most_tokens))


def answers(ctx: Ctx, *names: str) -> Mapping[str, Any] | None:
    """What the client answered to these requests, if it answered all of them in a form that can be read."""
    given = ctx.input_responses or {}
    found = {name: given[name].model_dump(by_alias=True) for name in names if name in given}
    return found if len(found) == len(names) else None


def asked(state: str | None = None, **requests: Any) -> InputRequiredResult:
    return InputRequiredResult(input_requests=requests, request_state=state)


NAME = form("What is your name?", name={"type": "string"})


class Contact(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Defaults(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Literal["active", "inactive", "pending"] = "active"
    verified: bool = True


class Enums(BaseModel):
    untitledSingle: Literal["option1", "option2", "option3"]
    titledSingle: Annotated[
        str,
        Field(
            json_schema_extra={
                "oneOf": [
                    {"const": f"value{n}", "title": f"{word} Option"} for n, word in enumerate(("First", "Second"), 1)
                ]
            }
        ),
    ]
    legacyEnum: Annotated[
        str,
        Field(
            json_schema_extra={
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            }
        ),
    ]
    untitledMulti: list[Literal["option1", "option2", "option3"]]
    titledMulti: Annotated[
        list[str],
        Field(
            json_schema_extra={
                "items": {
                    "anyOf": [
                        {"const": f"value{n}", "title": f"{word} Choice"}
                        for n, word in enumerate(("First", "Second"), 1)
                    ]
                }
            }
        ),
    ]


def mount(server: MCPServer[Any]) -> None:
    """Add every fixture."""
    _add_content(server)
    _add_notes(server)
    _add_questions(server)
    _add_rounds(server)
    _add_resources(server)
    _add_prompts(server)


def _add_content(server: MCPServer[Any]) -> None:
    @server.tool()
    async def test_simple_text() -> CallToolResult:
        """Text."""
        return text("This is a simple text response for testing.")

    @server.tool()
    async def test_image_content() -> CallToolResult:
        """An image."""
        return CallToolResult(content=[image()])

    @server.tool()
    async def test_audio_content() -> CallToolResult:
        """A sound."""
        sound = AudioContent(type="audio", data=base64.b64encode(SILENCE).decode(), mime_type="audio/wav")
        return CallToolResult(content=[sound])

    @server.tool()
    async def test_embedded_resource() -> CallToolResult:
        """A resource inside an answer."""
        return CallToolResult(content=[embedded("test://embedded-resource", "This is an embedded resource content.")])

    @server.tool()
    async def test_multiple_content_types() -> CallToolResult:
        """Text, an image and a resource."""
        content: list[ContentBlock] = [
            TextContent(type="text", text="Multiple content types test:"),
            image(),
            embedded("test://mixed-content-resource", '{"test":"data","value":123}', "application/json"),
        ]
        return CallToolResult(content=content)

    @server.tool()
    async def test_error_handling() -> CallToolResult:
        """An error."""
        raise ToolError("This tool intentionally returns an error for testing")

    async def described(arguments: dict[str, Any]) -> CallToolResult:
        return text("ok")

    class Raw(FuncMetadata):
        def validate_arguments(self, arguments_to_validate: dict[str, Any]) -> dict[str, Any]:
            return {"arguments": arguments_to_validate}

    tool = Tool(
        fn=described, name="json_schema_2020_12_tool", title="Schema", description="A tool with a wide schema.",
        parameters=WIDE_SCHEMA, fn_metadata=Raw(arg_model=ArgModelBase), is_async=True,
    )  # fmt: skip
    server._tool_manager._tools[tool.name] = tool  # the SDK has no way to add a tool with a schema of its own


def _add_notes(server: MCPServer[Any]) -> None:
    @server.tool()
    async def test_tool_with_logging(ctx: Ctx) -> CallToolResult:
        """Three log messages."""
        for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.info(words)
            await anyio.sleep(STEP_S)
        return text("done")

    @server.tool()
    async def test_logging_tool(ctx: Ctx) -> CallToolResult:
        """A log message for those who asked for one."""
        await ctx.info("a message")
        return text("done")

    @server.tool()
    async def test_tool_with_progress(ctx: Ctx) -> CallToolResult:
        """Progress from 0 to 100."""
        for progress in (0, 50, 100):
            await ctx.report_progress(progress, 100)
            await anyio.sleep(STEP_S)
        return text("done")

    @server.tool()
    async def test_trigger_tool_change(ctx: Ctx) -> CallToolResult:
        """Says that the list of tools changed."""
        await ctx.notify_tools_changed()
        return text("done")

    @server.tool()
    async def test_trigger_prompt_change(ctx: Ctx) -> CallToolResult:
        """Says that the list of prompts changed."""
        await ctx.notify_prompts_changed()
        return text("done")


def _add_questions(server: MCPServer[Any]) -> None:
    """Requests to the client in the middle of a call: the handshake era."""

    @server.tool()
    async def test_sampling(prompt: str, ctx: Ctx) -> CallToolResult:
        """Asks the client's model."""
        message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
        answer = await ctx.session.create_message([message], max_tokens=100, related_request_id=ctx.request_id)
        return text(f"LLM response: {answer.content}")

    async def elicited(ctx: Ctx, message: str, schema: type[BaseModel]) -> CallToolResult:
        answer = await ctx.elicit(message, schema)
        content = answer.data.model_dump() if answer.action == "accept" else None
        return text(f"Elicitation completed: action={answer.action}, content={json.dumps(content)}")

    @server.tool()
    async def test_elicitation(message: str, ctx: Ctx) -> CallToolResult:
        """Asks the user."""
        return await elicited(ctx, message, Contact)

    @server.tool()
    async def test_elicitation_sep1034_defaults(ctx: Ctx) -> CallToolResult:
        """Asks the user, with defaults."""
        return await elicited(ctx, "Please review", Defaults)

    @server.tool()
    async def test_elicitation_sep1330_enums(ctx: Ctx) -> CallToolResult:
        """Asks the user to choose."""
        return await elicited(ctx, "Please choose", Enums)

    @server.tool()
    async def test_missing_capability(ctx: Ctx) -> CallToolResult:
        """Needs a client that samples."""
        if ctx.client_capabilities is None or ctx.client_capabilities.sampling is None:
            needed = {"requiredCapabilities": {"sampling": {}}}
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "this tool needs sampling", needed)
        return text("the client samples")


def _add_rounds(server: MCPServer[Any]) -> None:
    """Requests to the client as results that ask for input: the sessionless era."""

    @server.tool()
    async def test_input_required_result_elicitation(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks for a name."""
        given = answers(ctx, "user_name")
        return asked(user_name=NAME) if given is None else text(f"Hello, {given['user_name']['content']['name']}!")

    @server.tool()
    async def test_streaming_elicitation(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks for a name."""
        return asked(user_name=NAME) if answers(ctx, "user_name") is None else text("thank you")

    @server.tool()
    async def test_input_required_result_sampling(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks the client's model."""
        given = answers(ctx, "capital_question")
        if given is None:
            return asked(capital_question=sample("What is the capital of France?"))
        return text(json.dumps(given["capital_question"]["content"]))

    @server.tool()
    async def test_input_required_result_list_roots(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks for the client's roots."""
        given = answers(ctx, "client_roots")
        if given is None:
            return asked(client_roots=ListRootsRequest())
        return text(", ".join(str(root["uri"]) for root in given["client_roots"]["roots"]))

    @server.tool()
    async def test_input_required_result_request_state(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks for a confirmation and checks the state it gave along."""
        if answers(ctx, "confirm") is None or ctx.request_state != "waiting":
            return asked("waiting", confirm=form("Please confirm", ok={"type": "boolean"}))
        return text("state-ok")

    @server.tool()
    async def test_input_required_result_tampered_state(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks for a confirmation; the SDK refuses a state that was changed."""
        if answers(ctx, "confirm") is None:
            return asked("waiting", confirm=form("Please confirm", ok={"type": "boolean"}))
        return text("confirmed")

    @server.tool()
    async def test_input_required_result_multiple_inputs(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks three things at once."""
        if answers(ctx, "user_name", "greeting", "client_roots") is None:
            return asked(
                "waiting", user_name=NAME, greeting=sample("Generate a greeting", 50), client_roots=ListRootsRequest()
            )
        return text("all three came")

    @server.tool()
    async def test_input_required_result_multi_round(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks twice."""
        if ctx.request_state == "two" and answers(ctx, "step2") is not None:
            return text("both came")
        if ctx.request_state == "one" and answers(ctx, "step1") is not None:
            return asked("two", step2=form("Step 2: What is your favorite color?", color={"type": "string"}))
        return asked("one", step1=form("Step 1: What is your name?", name={"type": "string"}))

    @server.tool()
    async def test_input_required_result_capabilities(ctx: Ctx) -> CallToolResult | InputRequiredResult:
        """Asks only what the client declared that it can do."""
        able = ctx.client_capabilities
        requests: dict[str, Any] = {}
        if able is not None and able.elicitation is not None:
            requests["user_name"] = NAME
        if able is not None and able.sampling is not None:
            requests["greeting"] = sample("Generate a greeting")
        return asked(**requests) if requests and answers(ctx, *requests) is None else text("nothing more to ask")


def _add_resources(server: MCPServer[Any]) -> None:
    @server.resource("test://static-text", mime_type="text/plain")
    async def static_text() -> str:
        """Text."""
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png")
    async def static_binary() -> bytes:
        """An image."""
        return RED_PIXEL

    @server.resource("test://watched-resource", mime_type="text/plain")
    async def watched() -> str:
        """Text that may change."""
        return "watched"

    @server.resource("test://template/{id}/data", mime_type="application/json")
    async def templated(id: str) -> str:
        """A resource made from its address."""
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


def _add_prompts(server: MCPServer[Any]) -> None:
    @server.prompt()
    def test_simple_prompt() -> list[UserMessage]:
        """A prompt."""
        return [UserMessage("This is a simple prompt for testing.")]

    @server.prompt()
    def test_prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
        """A prompt with arguments."""
        return [UserMessage(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'")]

    @server.prompt()
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
        """A prompt with a resource."""
        resource = embedded(resourceUri, "Embedded resource content for testing.")
        return [UserMessage(resource), UserMessage("Please process the embedded resource above.")]

    @server.prompt()
    def test_prompt_with_image() -> list[UserMessage]:
        """A prompt with an image."""
        return [UserMessage(image()), UserMessage("Please analyze the image above.")]

    @server.prompt()
    async def test_input_required_result_prompt(ctx: Ctx) -> list[UserMessage] | InputRequiredResult:
        """A prompt that asks first."""
        given = answers(ctx, "user_context")
        if given is None:
            return asked(user_context=form("What context should the prompt use?", context={"type": "string"}))
        return [UserMessage(f"Context: {given['user_context']['content']['context']}")]
