"""Resources and prompts over a fake workbench, in both protocol eras."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from calls import answer
from fakes import RELU, FakeWorkbench
from mcp import Client, MCPError
from mcp.types import PromptReference, ResourceTemplateReference

Play = Callable[[Callable[[Client], Any]], None]


async def read(client: Client, uri: str) -> str:
    text: str = (await client.read_resource(uri)).contents[0].text  # type: ignore[union-attr]
    return text


async def missing(client: Client, uri: str) -> str:
    with pytest.raises(MCPError) as caught:
        await client.read_resource(uri)
    return str(caught.value)


def test_every_template_of_the_contract_is_listed(play: Play) -> None:
    async def scenario(client: Client) -> None:
        templates = [item.uri_template for item in (await client.list_resource_templates()).resource_templates]
        assert [uri.removesuffix("{?offset,limit}") for uri in templates] == [
            "optiml://problems/{name}",
            "optiml://kernels/{kernel_id}",
            "optiml://kernels/{kernel_id}/ptx",
            "optiml://kernels/{kernel_id}/profile",
            "optiml://runs/{run_id}",
            "optiml://runs/{run_id}/tree",
            "optiml://runs/{run_id}/report",
        ]
        listed = {str(item.uri) for item in (await client.list_resources()).resources}
        assert listed == {"optiml://schema/problem", "optiml://schema/kernel"}

    play(scenario)


def test_a_problem_and_the_schemas_can_be_read(play: Play) -> None:
    async def scenario(client: Client) -> None:
        assert json.loads(await read(client, "optiml://problems/relu"))["outputs"] == {
            "y": {"dtype": "float32", "shape": ["n"]}
        }
        assert "launches" in json.loads(await read(client, "optiml://schema/kernel"))["properties"]
        assert "workloads" in json.loads(await read(client, "optiml://schema/problem"))["required"]

    play(scenario)


def test_a_kernel_shows_its_source_its_full_verdict_its_ptx_and_its_profile(play: Play) -> None:
    async def scenario(client: Client) -> None:
        verdict = await answer(client, "compile_verify", kernel=RELU, problem="relu")
        uri = verdict["uri"]
        kernel = json.loads(await read(client, uri))
        assert "fmaxf" in kernel["kernel"]["source"]
        assert len(kernel["verdict"]["cases"]) == 14
        assert ".version" in await read(client, uri + "/ptx")
        await answer(client, "profile_ncu", kernel=RELU, problem="relu")
        assert json.loads(await read(client, uri + "/profile"))["kernel_id"] == verdict["kernel_id"]

    play(scenario)


def test_a_run_shows_its_result_its_tree_and_its_report(play: Play, bench: FakeWorkbench) -> None:
    run_id = bench.start_search("relu", evaluations=1)

    async def scenario(client: Client) -> None:
        assert json.loads(await read(client, f"optiml://runs/{run_id}"))["run_id"] == run_id
        assert json.loads(await read(client, f"optiml://runs/{run_id}/tree"))[0]["node"] == 0
        assert (await read(client, f"optiml://runs/{run_id}/report")).startswith("# Search")

    play(scenario)


def test_a_long_text_is_read_in_pages(play: Play, bench: FakeWorkbench) -> None:
    run_id = bench.start_search("relu")

    async def scenario(client: Client) -> None:
        uri = f"optiml://runs/{run_id}/report"
        whole = await read(client, uri)
        pages = [await read(client, f"{uri}?offset={offset}&limit=10") for offset in range(0, len(whole), 10)]
        assert "".join(pages) == whole
        assert "offset" in await missing(client, f"{uri}?offset=-1")

    play(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "kernels/0000000000000000",
        "kernels/0000000000000000/ptx",
        "kernels/0000000000000000/profile",
        "kernels/abc",
        "kernels/..%2F..%2Fetc%2Fpasswd",
        "problems/rel",
        "problems/%2e%2e",
        "problems/relu%00",
        "problems/" + "x" * 100_000,
        "runs/r-99",
        "runs/../../etc/passwd",
        "runs/%252e%252e",
        "runs//etc/passwd/tree",
        "schema/verdict",
        "nothing",
    ],
)
def test_whatever_is_not_there_gets_one_and_the_same_answer(play: Play, path: str) -> None:
    async def scenario(client: Client) -> None:
        assert (await missing(client, "optiml://" + path)).startswith("not_found: there is no such resource: ")

    play(scenario)


def test_both_prompts_name_the_tools_to_call(play: Play) -> None:
    async def scenario(client: Client) -> None:
        names = [prompt.name for prompt in (await client.list_prompts()).prompts]
        assert names == ["optimise_kernel", "write_kernel"]
        optimise = await client.get_prompt("optimise_kernel", {"problem": "softmax", "evaluations": "10"})
        assert "run_mcts" in optimise.messages[0].content.text  # type: ignore[union-attr]
        write = await client.get_prompt("write_kernel", {"intent": "fp16 softmax"})
        assert "fp16 softmax" in write.messages[0].content.text  # type: ignore[union-attr]

    play(scenario)


def test_run_ids_are_completed(play: Play, bench: FakeWorkbench) -> None:
    async def scenario(client: Client) -> None:
        run_id = (await answer(client, "run_mcts", action="start", problem="relu"))["run_id"]
        template = ResourceTemplateReference(type="ref/resource", uri="optiml://runs/{run_id}/report{?offset,limit}")
        found = await client.complete(template, {"name": "run_id", "value": run_id[:3]})
        assert found.completion.values == [run_id]
        none = await client.complete(template, {"name": "run_id", "value": "x"})
        assert none.completion.values == []

    play(scenario)


def test_problem_names_are_completed(play: Play) -> None:
    async def scenario(client: Client) -> None:
        prompt = PromptReference(type="ref/prompt", name="optimise_kernel")
        found = await client.complete(prompt, {"name": "problem", "value": "soft"})
        assert found.completion.values == ["softmax"]

    play(scenario)
