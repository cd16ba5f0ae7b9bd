"""Any combination of rules ends a request at the same token, in runs as one by one.

The oracle feeds single tokens to SGLang's own tests, under a limit that is out of the way, and
knows grammar, end of the reasoning and limit by itself. Grammars are real ones of xgrammar over a
small vocabulary with tokens of several characters and halves of a character.
"""

from array import array
from typing import NamedTuple

import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.constrained import xgrammar_backend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.cpu_hooks import mask_without_pinned_memory
from dspark.host.finish import take, update_finish_state
from dspark.speculation.sampling import BROKEN

VOCABULARY = [b"<eos>", b"a", b"b", b"c", b"ab", b"bc", b"cab", b"\xc3", b"\xa9", b"a\xc3", b"<t>"]
EOS, THINK_END = 0, 10
END_OF_THOUGHT = (THINK_END, 1)  # a marker of several tokens, as with small vocabularies
TEXT_TOKENS = range(1, len(VOCABULARY))


@pytest.fixture(scope="module", autouse=True)
def masks_on_this_machine():
    stock = xgrammar_backend._allocate_token_bitmask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            xgrammar_backend,
            "_allocate_token_bitmask",
            lambda vocab, rows: mask_without_pinned_memory(stock, vocab, rows),
        )
        yield


class Tokenizer:
    """Tokens of VOCABULARY; EOS is not part of a text."""

    eos_token_id = EOS
    additional_stop_token_ids = None

    def decode(self, ids, **_):
        return b"".join(VOCABULARY[i] for i in ids if i != EOS).decode(errors="replace")

    def encode(self, text, **_):
        return list(text.encode())


COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[EOS]))
GRAMMARS = {
    regex: COMPILER.compile_regex(regex)
    for regex in ("[abc]{3}", "(ab|bc)*", "a[bc]{0,4}é?", "(é|ab){1,3}", "[abcé]*")
}
ENDS = ["a", "b", "ca", "bcb", "aab", "é", "cé", "abcab", "ccc"]
EXPRESSIONS = ["a[bc]a", "b{2}", "é.", "c$", "^ab"]


class Case(NamedTuple):
    rules: dict
    regex: str | None
    # What the target would choose, before a grammar has its say; THINK_END stands for the marker.
    choices: list[int]
    broken: int | None  # the place of a token that cannot be chosen
    runs: list[int]  # lengths of the accepted runs; the last repeats
    thinking: bool | None = None  # a grammar waits for the end of the reasoning; None: no parser


cases = st.builds(
    Case,
    rules=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(0, 16),
            "stop": st.lists(st.sampled_from(ENDS), max_size=3, unique=True),
            "stop_regex": st.lists(st.sampled_from(EXPRESSIONS), max_size=2, unique=True),
            "stop_token_ids": st.lists(st.sampled_from(TEXT_TOKENS), max_size=2),
            "ignore_eos": st.booleans(),
        }
    ),
    regex=st.none() | st.sampled_from(sorted(GRAMMARS)),
    choices=st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=24, max_size=24),
    broken=st.none() | st.integers(0, 16),
    runs=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    thinking=st.none() | st.booleans(),
)


def matcher(case):
    return xgrammar.GrammarMatcher(GRAMMARS[case.regex])


def request(case) -> Req:
    params = SamplingParams(**case.rules)
    params.normalize(Tokenizer())
    req = Req("r", "", array("q", [1]), params, vocab_size=len(VOCABULARY), eos_token_ids={EOS})
    req.tokenizer = Tokenizer()
    if case.regex is not None:
        req.grammar = xgrammar_backend.XGrammarGrammar(
            matcher(case), len(VOCABULARY), GRAMMARS[case.regex], None
        )
        if case.thinking is not None:
            req.grammar = ReasonerGrammarObject(req.grammar, list(END_OF_THOUGHT))
            req.grammar.maybe_init_reasoning(case.thinking)
    return req


def rule_of(case):
    """Function (tokens so far) -> matcher of the case's grammar; None where it does not apply."""
    rule, size = None if case.regex is None else matcher(case), len(END_OF_THOUGHT)

    def applies(tokens):
        ends = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        return None if case.thinking and END_OF_THOUGHT not in ends else rule

    return applies


def targets_tokens(case) -> list[int]:
    """The choices, each moved on to the next token that the grammar admits."""
    tokens, rule_at = [], rule_of(case)
    choices = [t for c in case.choices for t in (END_OF_THOUGHT if c == THINK_END else (c,))]
    for choice in choices:
        rule = rule_at(tokens)
        if rule is not None and not rule.is_terminated():
            mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
            rule.fill_next_token_bitmask(mask)
            while not mask[0, 0] >> choice & 1:
                choice = (choice + 1) % len(VOCABULARY)
            assert rule.accept_token(choice)
        tokens.append(choice)
    if case.broken is not None:
        tokens[case.broken] = BROKEN
    return tokens


def outcome(req):
    return list(req.output_ids_through_stop), req.finished_reason.to_json(), req.reasoning_tokens


def expected(case):
    """One token after the other through SGLang's own rules."""
    req, limit = request(case), case.rules["max_new_tokens"]
    rule_at, req.grammar = rule_of(case), None
    req.sampling_params.max_new_tokens = 1 << 30
    for place, token in enumerate(targets_tokens(case)):
        if token == BROKEN:
            return list(req.output_ids), "abort", place
        rule = rule_at(req.output_ids)
        req.output_ids.append(token)
        req.update_reasoning_tokens(token, [THINK_END])
        if place < limit:  # a limit of 0 still yields a first token, which is not delivered
            Req.update_finish_state(req, 1)
        if rule is not None and not rule.is_terminated():
            rule.accept_token(token)
        ended = rule is not None and rule.is_terminated() and place < limit
        if req.finished():
            return outcome(req)
        if ended:
            return list(req.output_ids), {"type": "stop", "matched": token}, req.reasoning_tokens
        if place + 1 >= limit:
            reason = {"type": "length", "length": limit}
            return list(req.output_ids)[:limit], reason, min(req.reasoning_tokens, limit)
    raise AssertionError("the longest limit is below the number of tokens")


def in_runs(case) -> tuple[Req, list[int]]:
    """The request at its end, and what was delivered at each step: a prompt's token, then runs."""
    req, tokens, lengths = request(case), targets_tokens(case), [1, *case.runs]
    delivered = []
    while not req.finished():
        length = lengths.pop(0) if len(lengths) > 1 else lengths[0]
        run, tokens = tokens[:length], tokens[length:]
        taken = take(req, run)
        req.output_ids.extend(taken)
        req.update_reasoning_tokens(taken, [THINK_END])
        update_finish_state(req, grammar_behind=False)
        delivered.append(len(taken))
    return req, delivered


def one_by_one(case) -> Req:
    """As SGLang's target-only loop does it: the grammar is advanced after the test."""
    req = request(case)
    for token in targets_tokens(case):
        req.output_ids.append(token)
        req.update_reasoning_tokens(token, [THINK_END])
        update_finish_state(req, grammar_behind=True)
        if req.finished():
            return req
        if req.grammar is not None:
            req.grammar.accept_token(token)
    raise AssertionError("the longest limit is below the number of tokens")


def check(case):
    ids, reason, reasoning = expected(case)
    for req in (in_runs(case)[0], one_by_one(case)):
        found = outcome(req)
        if reason == "abort":
            assert (found[0], found[1]["type"], found[1]["status_code"]) == (ids, "abort", 500)
        else:
            assert found == (ids, reason, reasoning)
        assert BROKEN not in req.output_ids
    req, delivered = in_runs(case)
    if case.rules["max_new_tokens"]:
        assert sum(delivered) == len(ids), "nothing behind the end is delivered"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases)
def test_runs_end_as_single_tokens_do(case):
    check(case)


@pytest.mark.deep
@settings(
    max_examples=6000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases)
def test_runs_end_as_single_tokens_do_in_thousands_of_cases(case):
    check(case)


def test_every_rule_ends_some_of_the_cases():
    """Otherwise the comparison above would show little."""
    kinds = set()

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(cases)
    def count(case):
        reason = expected(case)[1]
        if reason == "abort":
            kinds.add("broken")
        elif reason["type"] == "length":
            kinds.add("length")
        elif isinstance(reason["matched"], str):
            kinds.add("string" if reason["matched"] in ENDS else "expression")
        elif reason["matched"] != EOS:
            kinds.add("token")
        else:
            kinds.add("grammar" if case.rules["ignore_eos"] else "eos")

    count()
    assert kinds == {"broken", "length", "string", "expression", "token", "grammar", "eos"}


def test_a_grammar_that_ends_inside_a_run_does_not_lift_the_limit():
    """Failed before: a limit of 2 gave 7 tokens, one of 10 gave 13."""
    rules = {"max_new_tokens": 2, "ignore_eos": False}
    case = Case(rules, "[abc]{3}", [1, 1, 1, EOS] + [1] * 20, None, [6])
    req, delivered = in_runs(case)
    assert list(req.output_ids) == [1, 1]
    assert req.finished_reason.to_json() == {"type": "length", "length": 2}
    assert delivered == [1, 1]
