"""The mixture on three tiny random experts: a Llama, a Qwen2 and a StarCoder2 model with vocabularies of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra `mixture`)")
pytest.importorskip("transformers", reason="transformers is not installed (extra `mixture`)")

from tiny_experts import KINDS, model, tokenizer  # noqa: E402

from optiml.errors import ModelFailed  # noqa: E402
from optiml.mixture.decode import Sampling, Written, repeats, write  # noqa: E402
from optiml.mixture.experts import Expert  # noqa: E402
from optiml.mixture.interaction import UNSEEN, Interaction, PeerStates  # noqa: E402
from optiml.mixture.mixture import Batch, Mixture, MixtureShape, batch_of, lagged  # noqa: E402
from optiml.mixture.router import choose, load_balance, log_gates, negative_entropy  # noqa: E402
from optiml.mixture.tokens import TextStream, TextTokenizer, reached  # noqa: E402

PROMPT = "relu of n elements, naïve é 数\n"
SHAPE = MixtureShape(stacks=3, active=3, shared_width=16, heads=2, router_hidden=8)
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def experts() -> tuple[Expert, ...]:
    """In float64, so that two ways to compute one thing agree to many digits."""
    made = []
    for seed, (kind, vocabulary) in enumerate(KINDS):
        own = tokenizer(vocabulary)
        made.append(Expert(model(kind, len(own), seed=seed).double(), TextTokenizer(own, kind), stacks=SHAPE.stacks))
    return tuple(made)


def untrained(experts: tuple[Expert, ...]) -> Mixture:
    torch.manual_seed(0)
    return Mixture(experts, SHAPE).double().eval()


def trained(experts: tuple[Expert, ...]) -> Mixture:
    """Every trainable number is random, so that whatever can have an effect has one."""
    mixture = untrained(experts)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mixture


def batch(mixture: Mixture, order: tuple[int, ...], *texts: str) -> Batch:
    rows = []
    for text in texts:
        view = mixture.experts[order[0]].tokenizer.view(text)
        rows.append((view.ids, view.ends, text))
    return batch_of(mixture, order, rows)


def gates(mixture: Mixture, rows: int) -> torch.Tensor:
    return torch.log(torch.tensor([[0.5, 0.3, 0.2]] * rows, dtype=torch.float64))


# --- one forward pass ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: KINDS[order[0]][0])
def test_an_untrained_mixture_equals_its_primary_bit_for_bit(experts: tuple[Expert, ...], order) -> None:
    mixture = untrained(experts)
    given = batch(mixture, order, PROMPT * 2)
    with torch.no_grad():
        logits = mixture(given, gates(mixture, 1))
        alone = experts[order[0]].model(input_ids=given.ids[0], use_cache=False).logits
    assert torch.equal(logits, alone)


def test_an_expert_alone_is_left_as_it_was_even_by_trained_layers(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    given = batch(mixture, (1,), PROMPT)
    with torch.no_grad():
        alone = experts[1].model(input_ids=given.ids[0], use_cache=False).logits
        assert torch.equal(mixture(given, torch.zeros(1, 1, dtype=torch.float64)), alone)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: KINDS[order[0]][0])
def test_no_later_token_of_any_view_changes_an_earlier_logit(experts: tuple[Expert, ...], order) -> None:
    mixture = trained(experts)
    given = batch(mixture, order, PROMPT)
    with torch.no_grad():
        before = mixture(given, gates(mixture, 1))
        for place, index in enumerate(order):
            length = given.ids[place].shape[1]
            for changed in (length // 3, 2 * length // 3, length - 1):
                ids = [one.clone() for one in given.ids]
                ids[place][0, changed] = (ids[place][0, changed] + 7) % experts[index].facts.vocabulary_size
                after = mixture(
                    Batch(active=order, ids=tuple(ids), ends=given.ends, limits=given.limits), gates(mixture, 1)
                )
                if place == 0:
                    earlier = torch.arange(before.shape[1]) < changed
                else:
                    earlier = given.limits[0] < given.ends[place][0, changed]
                same = (before == after).all(dim=-1)[0]
                assert same[earlier].all()
                assert not same[~earlier].any()


def test_padded_rows_of_a_batch_get_the_logits_that_they_get_alone(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    texts = (PROMPT, "sum\n", "row softmax over 128 columns in float16, one block per row\n")
    with torch.no_grad():
        together = mixture(batch(mixture, (0, 1, 2), *texts), gates(mixture, 3))
        for row, text in enumerate(texts):
            alone = mixture(batch(mixture, (0, 1, 2), text), gates(mixture, 1))
            torch.testing.assert_close(together[row, : alone.shape[1]], alone[0], rtol=1e-9, atol=1e-9)


def test_gradient_reaches_the_router_and_the_interaction_layers_only(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    given = batch(mixture, (0, 1, 2), PROMPT)
    scores = mixture.scores([PROMPT])
    mixture(given, log_gates(scores, torch.tensor([[0, 1, 2]]))).log_softmax(-1)[0, :, 5].sum().backward()
    names = {name for name, parameter in mixture.named_parameters() if parameter.grad is not None}
    assert {name.split(".")[0] for name in names} == {"router", "interactions"}
    assert all(parameter.grad.abs().sum() > 0 for parameter in mixture.router.parameters())
    assert not any(parameter.requires_grad for expert in experts for parameter in expert.model.parameters())


def test_a_new_interaction_layer_learns_through_its_gate_first(experts: tuple[Expert, ...]) -> None:
    mixture = untrained(experts)
    mixture(batch(mixture, (0, 1, 2), PROMPT), gates(mixture, 1)).log_softmax(-1)[0, :, 5].sum().backward()
    moved = {name for name, value in mixture.named_parameters() if value.grad is not None and value.grad.abs().sum()}
    assert moved == {f"interactions.{layer}.primary_gates" for layer in range(SHAPE.stacks - 1)}


def test_a_token_that_sees_no_peer_gets_nothing() -> None:
    layer = Interaction((4, 6), 8, 2)
    torch.nn.init.ones_(layer.primary_gates)
    torch.nn.init.zeros_(layer.outward[0].bias)
    peer = PeerStates(
        keys=torch.randn(1, 2, 3, 4),
        values=torch.randn(1, 2, 3, 4),
        ends=torch.tensor([[5, 9, UNSEEN]]),
        log_gate=torch.zeros(1),
    )
    hidden = torch.randn(1, 2, 4)
    changed = layer.primary_update(0, hidden, torch.tensor([[4, 5]]), [peer]) != hidden
    assert changed.any(dim=-1).tolist() == [[False, True]]


def test_a_gate_near_zero_silences_its_peer(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    given = batch(mixture, (0, 1), PROMPT)
    with torch.no_grad():
        alone = mixture(batch(mixture, (0,), PROMPT), torch.zeros(1, 1, dtype=torch.float64))
        open_gate = mixture(given, torch.log(torch.tensor([[0.5, 0.5]], dtype=torch.float64)))
        closed = mixture(given, torch.log(torch.tensor([[1.0, 1e-12]], dtype=torch.float64)))
    assert (open_gate - alone).abs().max() > 1e-3
    outward = mixture.interactions[0].outward[0].bias  # the layer's own bias is all that is left
    assert (closed - alone).abs().max() < (open_gate - alone).abs().max() + outward.abs().max()


# --- writing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: KINDS[order[0]][0])
def test_an_untrained_mixture_writes_what_its_primary_writes(experts: tuple[Expert, ...], order) -> None:
    primary = experts[order[0]]
    (written,) = write(untrained(experts), [PROMPT], Sampling(max_tokens=24, refresh=4), active=[order])
    ids = torch.tensor([primary.tokenizer.view(PROMPT).ids])
    alone = primary.model.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))
    assert list(written.ids) == alone[0, ids.shape[1] :].tolist()


def test_cached_writing_with_refresh_one_equals_a_forward_over_the_whole_text(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    order = (0, 1, 2)
    seen: list[torch.Tensor] = []
    (written,) = write(
        mixture,
        [PROMPT],
        Sampling(max_tokens=20, refresh=1, temperature=1.0, seed=4),
        active=[order],
        watch=lambda _, logits: seen.append(logits),
    )
    own = experts[0].tokenizer
    view, stream = own.view(PROMPT), TextStream(own)
    limits = list(view.ends)
    for step, logits in enumerate(seen):
        with torch.no_grad():
            given = batch_of(mixture, order, [((*view.ids, *stream.ids), limits, PROMPT + stream.text)])
            whole = mixture(given, log_gates(mixture.scores([PROMPT]), torch.tensor([order])))
        torch.testing.assert_close(logits, whole[0, -1], rtol=1e-9, atol=1e-9)
        stream.push(written.ids[step])
        limits.append(len(PROMPT + stream.text))
    assert len(seen) == 20


def test_peers_that_lag_write_what_a_forward_with_lagged_limits_says(experts: tuple[Expert, ...]) -> None:
    """Bytes as tokens and ASCII as text: then no token changes later, and a lag is all that differs."""
    plain = tokenizer(258)
    ascii_model = model("llama", len(plain), seed=7).double()
    with torch.no_grad():
        printable = [plain.convert_tokens_to_ids(char) for char in "abcdefgh;(){}"]
        keep = torch.zeros(len(plain), 1, dtype=torch.float64)
        keep[printable] = 1
        ascii_model.lm_head.weight.mul_(keep)
        ascii_model.model.embed_tokens.weight[~keep.bool()[:, 0]] = 0.1
    first = Expert(ascii_model, TextTokenizer(plain, "ascii"), stacks=SHAPE.stacks)
    mixture = trained((first, experts[2], first))
    order, refresh = (0, 1, 2), 4
    seen: list[torch.Tensor] = []
    sampling = Sampling(max_tokens=11, refresh=refresh, temperature=0.01)
    (written,) = write(mixture, ["sum\n"], sampling, active=[order], watch=lambda _, logits: seen.append(logits))
    assert written.text.isascii()
    view = first.tokenizer.view("sum\n")
    text = "sum\n" + written.text
    limits = [*view.ends, *range(5, len(text) + 1)]
    ids = (*view.ids, *written.ids)
    given = batch_of(mixture, order, [(ids, lagged(limits, 4, refresh), text)])
    with torch.no_grad():
        whole = mixture(given, log_gates(mixture.scores(["sum\n"]), torch.tensor([order])))[0]
    torch.testing.assert_close(torch.stack(seen), whole[3 : 3 + len(seen)], rtol=1e-9, atol=1e-9)


def test_a_batch_writes_what_each_of_its_rows_writes_alone(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    prompts = (PROMPT, "softmax\n", PROMPT, "sum of all 7 elements\n")
    orders = ((0, 1, 2), (0, 1, 2), (2, 1, 0), (0, 1, 2))
    sampling = Sampling(max_tokens=16, refresh=3, temperature=0.8, top_p=0.9, seed=1)
    together = write(mixture, prompts, sampling, active=orders)
    for number in (1, 2, 3):
        rows = [number] * (number + 1)  # so that the row of interest has the number that it had before
        alone = write(mixture, [prompts[row] for row in rows], sampling, active=[orders[row] for row in rows])
        assert alone[number].ids == together[number].ids
    assert together[0].ids != together[2].ids


def test_samples_of_one_prompt_differ_and_come_again_with_the_same_seed(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=11)
    first, again = (write(mixture, [PROMPT] * 2, sampling) for _ in range(2))
    assert [one.ids for one in first] == [one.ids for one in again]
    assert first[0].ids != first[1].ids


def test_rows_are_routed_one_by_one_and_the_first_expert_has_the_best_score(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    prompts = [PROMPT, "softmax\n", "a", "matrix product " * 6]
    written = write(mixture, prompts, Sampling(max_tokens=2))
    assert [one.active[0] for one in written] == mixture.scores(prompts).argmax(dim=-1).tolist()


def test_peers_that_read_rarely_cost_little_and_peers_that_read_always_cost_more(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)

    def cost(refresh: int) -> float:
        (written,) = write(
            mixture, [PROMPT], Sampling(max_tokens=80, refresh=refresh, temperature=1.0), active=[(0, 1, 2)]
        )
        return sum(written.forwarded) / sum(written.own)

    assert cost(16) <= 1.3
    assert cost(1) > cost(16)


def test_a_stop_string_ends_a_text_and_is_not_part_of_it(experts: tuple[Expert, ...]) -> None:
    sampling = Sampling(max_tokens=30, temperature=1.0, seed=2)
    (whole,) = write(untrained(experts), [PROMPT], sampling, active=[(0,)])
    stop = whole.text[5:7]
    (cut,) = write(
        untrained(experts), [PROMPT], Sampling(max_tokens=30, temperature=1.0, seed=2, stop=(stop,)), active=[(0,)]
    )
    assert (cut.text, cut.ending) == (whole.text[: whole.text.index(stop)], "stop")
    assert whole.ending == "length"


def test_endless_repetition_is_noticed_and_ends_the_text(experts: tuple[Expert, ...]) -> None:
    plain = tokenizer(258)
    stuck = model("llama", len(plain), seed=0)
    with torch.no_grad():
        stuck.lm_head.weight.zero_()  # every logit is equal, so the likeliest token is always the same
        stuck.generation_config.eos_token_id = 5
    expert = Expert(stuck, TextTokenizer(plain, "stuck"), stacks=2)
    expert.end_ids = frozenset()
    mixture = Mixture((expert,), MixtureShape(stacks=2, active=1, shared_width=8, heads=2)).eval()
    (written,) = write(mixture, ["sum"], Sampling(max_tokens=300))
    assert written.ending == "repetition"
    assert written.tokens_out < 200
    assert not repeats(list(range(500)))
    assert repeats([9, 9, 9, *[1, 2, 3, 4, 5] * 40])


def test_numbers_that_are_not_finite_are_an_error_and_not_hidden(experts: tuple[Expert, ...]) -> None:
    mixture = trained(experts)
    mixture.interactions[0].out.weight.data.fill_(float("nan"))
    with pytest.raises(ModelFailed, match="not finite"):
        write(mixture, [PROMPT], Sampling(max_tokens=4))


def test_an_empty_prompt_and_one_beyond_the_context_are_refused(experts: tuple[Expert, ...]) -> None:
    with pytest.raises(ModelFailed, match="empty"):
        write(untrained(experts), [" \n"], Sampling())
    with pytest.raises(ModelFailed, match="shorten the intent") as refused:
        write(untrained(experts), ["x" * 100_000], Sampling())
    assert refused.value.code == "model_reply_unusable"


def test_tokens_in_and_out_are_counted(experts: tuple[Expert, ...]) -> None:
    written: Written = write(untrained(experts), [PROMPT], Sampling(max_tokens=7), active=[(2,)])[0]
    assert (written.read, written.tokens_out) == ((len(experts[2].tokenizer.view(PROMPT).ids),), 7)
    assert written.forwarded == (6,)  # the last token is written and never read


# --- parts -----------------------------------------------------------------------------------------------------------
def test_a_part_of_a_character_has_not_reached_its_end() -> None:
    assert reached([(0, 1), (1, 2), (1, 2), (2, 3)]) == [1, 1, 2, 3]
    assert reached([(0, 0), (0, 2), (3, 5), (0, 0)]) == [0, 2, 5, 5]
    assert reached([(0, 4)], start=10) == [14]


def test_text_that_comes_token_by_token_is_the_text_of_all_tokens() -> None:
    own = TextTokenizer(tokenizer(300), "tiny")
    text = "naïve 数 kernel: é\n if (i < n)"
    stream = TextStream(own)
    pieces = [stream.push(token) for token in own.view(text).ids]
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_tokenizer_without_offsets_is_refused_by_name() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelFailed, match="expert slow gives no character offsets"):
        TextTokenizer(Slow(), "slow")


def test_a_tokenizer_that_belongs_to_another_model_is_refused() -> None:
    with pytest.raises(ModelFailed, match="do not belong together"):
        Expert(model("llama", 100, seed=0), TextTokenizer(tokenizer(300), "odd"), stacks=2)


def test_more_stacks_than_layers_are_refused() -> None:
    own = tokenizer(258)
    with pytest.raises(ModelFailed, match="too few for 5 stacks"):
        Expert(model("llama", len(own), seed=0), TextTokenizer(own, "llama"), stacks=5)


def test_noise_changes_who_works_but_not_the_gates() -> None:
    scores = torch.tensor([[0.3, 0.2, 0.1, 0.0]], requires_grad=True)
    chosen = {
        tuple(choose(scores, 2, noise=torch.Generator().manual_seed(seed)).active[0].tolist()) for seed in range(40)
    }
    assert len(chosen) > 6
    routing = choose(scores, 2, primary=torch.tensor([3]))
    assert routing.active.tolist() == [[3, 0]]
    torch.testing.assert_close(routing.log_gates.exp().sum(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_the_load_is_even_at_one_and_its_gradient_lowers_the_busiest_expert() -> None:
    even = choose(torch.eye(3) * 50, 1)
    torch.testing.assert_close(load_balance(even), torch.tensor(1.0))
    scores = torch.tensor([[1.0, 0.0, 0.0]] * 4, requires_grad=True)
    load_balance(choose(scores, 1)).backward()
    assert scores.grad[0, 0] > 0 > scores.grad[0, 1]


def test_the_entropy_term_is_least_where_the_router_is_undecided() -> None:
    undecided, decided = (negative_entropy(choose(torch.tensor([row]), 1)) for row in ([0.0, 0.0], [9.0, 0.0]))
    assert undecided < decided


def test_a_written_token_sees_what_the_peers_had_read_at_the_last_refresh() -> None:
    assert lagged((1, 2, 3, 4, 5, 6, 7), 2, 3) == (1, 2, 3, 3, 3, 6, 6)
    assert lagged((1, 2, 3, 4), 2, 1) == (1, 2, 3, 4)
