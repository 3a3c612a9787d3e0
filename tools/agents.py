"""Two real coding agents against our server: the Claude Code and Codex command lines, driven by a scripted model.

    python tools/agents.py [--folder build/node] [--agent claude-code] [--json FILE] [--log FILE]

The model is a server on the loopback interface that speaks just enough of the Anthropic messages API and of the OpenAI
responses API, with streaming. It plays one script, on a kernel that is not built in: generate, verify, profile, judge,
five rounds of ask and tell, result. Every argument that depends on an earlier answer is taken from what the agent
showed the model, so an agent that hides or mangles our answers fails the run. The agents come from npm, run with a
scratch home, the configuration that `optiml serve --print-config` prints, a made-up key and proxies that lead nowhere,
and are bounded in time. Exit status 0 also where npm is missing: the reason is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from node import NotHere, install
from served import conditions

from optiml.diffs import make_diff
from optiml_mcp.__main__ import client_config

ROOT = Path(__file__).resolve().parent.parent
RUN_WITHIN_S = 400
MOST_CALLS = 80
TOOLS = ("compile_verify", "profile_ncu", "judge_patch", "generate_kernel", "run_mcts")
ROUNDS = 5
EXCERPT = 240  # characters of each answer in the transcript

PROBLEM = {
    "name": "hinge",
    "description": "y = max(0, 1 - a * x), elementwise",
    "axes": {"n": {"type": "var", "min": 1}},
    "inputs": {"x": {"dtype": "float32", "shape": ["n"]}, "a": {"dtype": "float32", "shape": None}},
    "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
    "reference": "def run(x, a):\n    return np.maximum(0.0, 1.0 - a * x)",
    "workloads": [{"axes": {"n": 1000}, "scalars": {"a": 2.0}}, {"axes": {"n": 4096}, "scalars": {"a": 0.5}}],
    "bench": [{"axes": {"n": 1 << 18}, "scalars": {"a": 2.0}}],
}
HEAD = 'extern "C" __global__ void hinge(const float* x, float* y, float a, int n) {\n'
STRIDED = (
    HEAD
    + """\
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    int rows = (n + 255) / 256;
    int i = (t & 255) * rows + (t >> 8);
    if (i < n) y[i] = fmaxf(0.0f, 1.0f - a * x[i]);
}
"""
)
AFTER = (  # five bodies, each of which computes the same
    "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) y[i] = fmaxf(0.0f, 1.0f - a * x[i]);\n}\n",
    "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    if (i < n) y[i] = fmaxf(0.0f, 1.0f - a * __ldg(x + i));\n}\n",
    "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) y[i] = fmaxf(0.0f, fmaf(-a, x[i], 1.0f));\n}\n",
    "    int t = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    for (int i = t; i < n; i += gridDim.x * blockDim.x) y[i] = fmaxf(0.0f, 1.0f - a * x[i]);\n}\n",
    "    int t = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    for (int i = t; i < n; i += gridDim.x * blockDim.x) y[i] = fmaxf(0.0f, fmaf(-a, __ldg(x + i), 1.0f));\n}\n",
)
LAUNCH = {"kernel": "hinge", "grid": ["ceil_div(n, 256)"], "block": [256], "args": ["x", "y", "a", "n"]}

Call = tuple[str, dict[str, Any]]
Script = Generator[Call, dict[str, Any], str]


class Unexpected(Exception):
    """An agent showed the model something else than it should."""


def expect(holds: object, what: str) -> None:
    """Raise Unexpected unless `holds`."""
    if not holds:
        raise Unexpected(what)


# --- what the model does ---------------------------------------------------------------------------------------------
def script() -> Script:
    """Tool calls, each answered with the structured reply as the model saw it; returns the model's last words."""
    made = yield "generate_kernel", {"intent": "hinge loss y = max(0, 1 - a*x) for a float32 vector x and a scalar a"}
    expect(made["status"] in ("needs_kernel", "done") and made["next_action"], "generate_kernel says what to do")
    verdict = yield from _finished("compile_verify", kernel={"source": STRIDED, "launches": [LAUNCH]}, problem=PROBLEM)
    expect(verdict["status"] == "accepted", f"the kernel is {verdict['status']}: {verdict.get('detail')}")
    first = verdict["kernel_id"]
    profile = yield from _finished("profile_ncu", kernel=first, problem=PROBLEM)
    expect(profile["bottleneck"]["kind"] and profile["hot_lines"], "the profile names a bottleneck and its lines")
    edit = {"base": first, "diff": make_diff(STRIDED, HEAD + AFTER[0])}
    judgement = yield from _finished("judge_patch", problem=PROBLEM, before=first, after=edit)
    expect(judgement["verdict"] in ("try", "measure_again"), f"the judge says {judgement['verdict']}")
    started = yield "run_mcts", {
        "action": "start", "problem": PROBLEM, "kernel": first, "proposer": "agent", "seed": 1,
        "budget": {"evaluations": 20},
    }  # fmt: skip
    run_id = started["run_id"]
    for number, body in enumerate(AFTER):
        state = yield from _stepped(run_id)
        expect(state["status"] == "needs_proposals", f"before round {number} the search is {state['status']}")
        request = state["requests"][0]
        told = yield "run_mcts", {
            "action": "tell", "run_id": run_id,
            "proposals": [
                {
                    "request_id": request["request_id"],
                    "kernel": {
                        "base": request["parent_kernel_id"],
                        "diff": make_diff(request["kernel"]["source"], HEAD + body),
                    },
                    "rationale": f"round {number}",
                }
            ],
        }  # fmt: skip
        outcome = told["answers"][0]["outcome"]
        expect(outcome in ("queued", "duplicate"), f"the proposal of round {number} is {outcome}")
    yield from _stepped(run_id)
    yield "run_mcts", {"action": "tell", "run_id": run_id, "proposals": []}
    state = yield from _stepped(run_id)
    expect(state["status"] == "finished", f"the search is {state['status']}: {state['summary']}")
    result = yield "run_mcts", {"action": "result", "run_id": run_id}
    expect(result["best"]["verdict"]["status"] == "accepted", "the best kernel is accepted")
    expect(result["speedup"]["median"] > 1.2, f"the best kernel is only {result['speedup']['median']} times faster")
    return f"{result['speedup']['median']:.2f}x {result['speedup']['source']}: {result['explanation'][0]}"


def _finished(tool: str, **arguments: Any) -> Generator[Call, dict[str, Any], dict[str, Any]]:
    """The complete answer of a tool, asked for by its job_id while it is pending."""
    reply = yield tool, arguments
    while reply.get("status") == "pending":
        reply = yield tool, {"job_id": reply["job_id"]}
    return reply


def _stepped(run_id: str) -> Generator[Call, dict[str, Any], dict[str, Any]]:
    """Where the search stands once it evaluates no more."""
    while True:
        state = yield "run_mcts", {"action": "step", "run_id": run_id}
        if state["status"] != "running":
            return state


@dataclass(kw_only=True)
class Model:
    """The scripted model: what it does next follows from the answers in the conversation alone."""

    tools: dict[str, int] = field(default_factory=dict)  # as the agent shows them -> characters of the description
    seen: list[dict[str, Any]] = field(default_factory=list)
    last_words: str = ""
    unexpected: str = ""

    def next(self, answers: Sequence[str]) -> Call | str:
        """The next call, or the last words."""
        play = script()
        try:
            call = next(play)
            for number, text in enumerate(answers):
                reply = _json_in(text)
                if number >= len(self.seen):
                    self._note(call, text, reply)
                call = play.send(reply)
            expect(len(answers) < MOST_CALLS, "the script does not come to its end")
        except StopIteration as end:
            self.last_words = end.value
            return self.last_words
        except (Unexpected, KeyError, IndexError, TypeError) as error:
            self.unexpected = f"{type(error).__name__}: {error}"
            return f"I give up: {self.unexpected}"
        return call

    def _note(self, call: Call, text: str, reply: dict[str, Any]) -> None:
        tool, arguments = call
        shown = {"tool": tool, "action": arguments.get("action"), "characters_seen": len(text)}
        facts = {name: reply[name] for name in ("status", "verdict", "summary", "next_action") if name in reply}
        self.seen.append({**{name: value for name, value in shown.items() if value is not None}, **facts})


def _json_in(text: str) -> dict[str, Any]:
    """The reply in what an agent made of it: some put words around the JSON."""
    begin = text.find("{")
    if begin < 0:
        raise Unexpected(f"an answer without an object: {text[:EXCERPT]}")
    try:
        reply, _ = json.JSONDecoder().raw_decode(text, begin)
    except ValueError as error:
        raise Unexpected(f"an answer that is no JSON any more: {text[:EXCERPT]}") from error
    if not isinstance(reply, dict):
        raise Unexpected(f"an answer that is no object: {text[:EXCERPT]}")
    return reply


# --- two APIs --------------------------------------------------------------------------------------------------------
def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text", "")) for block in content if isinstance(block, dict))


def anthropic_events(model: Model, body: dict[str, Any]) -> list[dict[str, Any]]:
    """One answer of the messages API as its events."""
    tools = {tool["name"]: len(tool.get("description", "")) for tool in body.get("tools", ())}
    ours = {name: size for name, size in tools.items() if name.startswith("mcp__optiml__")}
    blocks = [
        block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]
    ]
    answers = [_text_of(block["content"]) for block in blocks if block.get("type") == "tool_result"]
    done = model.next(answers) if ours else "A title"  # the agent also asks for titles, without our tools
    model.tools |= ours
    if isinstance(done, str):
        start, delta, reason = {"type": "text", "text": ""}, {"type": "text_delta", "text": done}, "end_turn"
    else:
        name, identifier = f"mcp__optiml__{done[0]}", f"toolu_{len(answers)}"
        start = {"type": "tool_use", "id": identifier, "name": name, "input": {}}
        delta, reason = {"type": "input_json_delta", "partial_json": json.dumps(done[1])}, "tool_use"
    message = {
        "id": f"msg_{len(answers)}", "type": "message", "role": "assistant", "model": body.get("model", "scripted"),
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": start},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop"},
    ]


def responses_events(model: Model, body: dict[str, Any]) -> list[dict[str, Any]]:
    """One answer of the responses API as its events."""
    for tool in body.get("tools", ()):
        if tool.get("name") == "mcp__optiml":
            model.tools |= {item["name"]: len(item.get("description", "")) for item in tool.get("tools", ())}
    answers = [_text_of(item["output"]) for item in body["input"] if item.get("type") == "function_call_output"]
    done, number = model.next(answers), len(answers)
    if isinstance(done, str):
        content = [{"type": "output_text", "text": done}]
        item: dict[str, Any] = {"type": "message", "role": "assistant", "id": f"msg_{number}", "content": content}
    else:
        item = {
            "type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "namespace": "mcp__optiml",
            "name": done[0], "arguments": json.dumps(done[1]),
        }  # fmt: skip
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    usage |= {"input_tokens_details": None, "output_tokens_details": None}  # type: ignore[dict-item]
    return [
        {"type": "response.created", "response": {"id": f"resp_{number}"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": f"resp_{number}", "usage": usage}},
    ]


@contextlib.contextmanager
def scripted(model: Model, log: list[dict[str, Any]]) -> Iterator[str]:
    """The model on a free port of this machine; its address."""
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            path = self.path.split("?")[0]
            make: Callable[[Model, dict[str, Any]], list[dict[str, Any]]] | None = {
                "/v1/messages": anthropic_events,
                "/v1/responses": responses_events,
            }.get(path)
            if make is None:
                self._send(200, "application/json", b'{"input_tokens": 1}')
                return
            with one_at_a_time:
                events = make(model, body)
                log.append({"path": path, "asked": body, "answered": events})
            lines = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
            self._send(200, "text/event-stream", lines.encode())

        def do_GET(self) -> None:
            self._send(404, "application/json", b"{}")

        do_HEAD = do_GET

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the requests are kept in `log`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- two agents ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Agent:
    """A command line and how it is told of the model and of our server."""

    name: str
    package: str
    version: str
    program: str  # pattern below the folder of npm packages
    prepare: Callable[[Path, str, dict[str, str]], tuple[list[str], dict[str, str]]]


def _server_environment(home: Path) -> dict[str, str]:
    return {"OPTIML_HOME": str(home / "optiml"), "PYTHONPATH": str(ROOT)}


def _claude(home: Path, url: str, server: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    configuration = json.loads(client_config("claude-code")[1])
    configuration["mcpServers"]["optiml"]["env"] = server
    (home / "mcp.json").write_text(json.dumps(configuration), encoding="utf-8")
    allowed = ",".join(f"mcp__optiml__{tool}" for tool in TOOLS)
    arguments = ["-p", "Make the hinge kernel faster.", "--mcp-config", str(home / "mcp.json"), "--strict-mcp-config"]
    quiet = {
        name: "1" for name in ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
    }
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "made-up", "ENABLE_TOOL_SEARCH": "false"}
    return [*arguments, "--allowedTools", allowed], {**quiet, **variables}


def _codex(home: Path, url: str, server: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    lines = [
        'model_provider = "scripted"', 'approval_policy = "never"', 'sandbox_mode = "danger-full-access"',
        "[model_providers.scripted]", 'name = "scripted"', f'base_url = "{url}/v1"', 'env_key = "SCRIPTED_KEY"',
        'wire_api = "responses"',
        client_config("codex")[1],
        "required = true",  # else the first call of a model that answers at once comes before the server is up
        "[mcp_servers.optiml.env]", *(f"{name} = {json.dumps(value)}" for name, value in server.items()),
    ]  # fmt: skip
    folder = home / "codex"
    folder.mkdir()
    (folder / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = ["exec", "--skip-git-repo-check", "-m", "scripted-model", "Make the hinge kernel faster."]
    return arguments, {"CODEX_HOME": str(folder), "SCRIPTED_KEY": "made-up"}


AGENTS = (
    Agent(
        name="claude-code", package="@anthropic-ai/claude-code", version="2.1.332",
        program="@anthropic-ai/claude-code-linux-*/claude", prepare=_claude,
    ),
    Agent(
        name="codex", package="@openai/codex", version="0.171.0",
        program="@openai/codex-linux-*/vendor/*/bin/codex", prepare=_codex,
    ),
)  # fmt: skip


def play(agent: Agent, program: Path, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Let an agent work through the script; what the model saw of it."""
    model, begun = Model(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, scripted(model, log) as url:
        home = Path(folder)
        work = home / "work"
        work.mkdir()
        arguments, variables = agent.prepare(home, url, _server_environment(home))
        nowhere = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
        surroundings = {"HOME": str(home), "PATH": "/usr/bin:/bin", **nowhere, "NO_PROXY": "127.0.0.1", **variables}
        try:
            done = subprocess.run(
                [str(program), *arguments], cwd=work, env={**surroundings, "no_proxy": "127.0.0.1"},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_WITHIN_S, check=False,
            )  # fmt: skip
            status, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            status, said = 124, f"it did not end within {RUN_WITHIN_S} s"
    complete = bool(model.last_words) and not model.unexpected and status == 0
    if not complete:
        print(said[-3000:], file=sys.stderr)
    return {
        "agent": agent.name,
        "version": agent.version,
        "complete": complete,
        "unexpected": model.unexpected,
        "exit_status": status,
        "seconds": round(time.monotonic() - begun, 1),
        "tools_as_the_model_sees_them": model.tools,
        "calls": len(model.seen),
        "rounds_told": sum(item.get("action") == "tell" for item in model.seen) - 1,
        "last_words": model.last_words,
        "seen": model.seen,
    }


def main() -> int:
    """Install, play, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/node"), help="where npm packages are kept")
    parser.add_argument("--agent", choices=[agent.name for agent in AGENTS], help="only this one")
    parser.add_argument("--json", type=Path, help="write what the models saw to this file")
    parser.add_argument("--log", type=Path, help="write every request and answer of the models to this file")
    options = parser.parse_args()
    log: list[dict[str, Any]] = []
    reports = []
    for agent in AGENTS:
        if options.agent in (None, agent.name):
            try:
                package = install(options.folder.resolve(), f"{agent.package}@{agent.version}", agent.package)
            except NotHere as reason:
                print(f"skipped: {reason}")
                return 0
            programs = sorted(package.parent.parent.glob(agent.program))
            if not programs:
                print(f"skipped: {agent.package} brought no program for this machine")
                return 0
            report = play(agent, programs[0], log)
            reports.append(report)
            print(
                f"{agent.name} {agent.version}: {report['calls']} calls, {report['rounds_told']} rounds in "
                f"{report['seconds']} s: {report['last_words'] or report['unexpected'] or 'it did not come to its end'}"
            )
    summary = {"command": "python tools/agents.py", "conditions": conditions(), "agents": reports}
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if options.log is not None:
        options.log.write_text("".join(json.dumps(entry) + "\n" for entry in log), encoding="utf-8")
    return 0 if all(report["complete"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
