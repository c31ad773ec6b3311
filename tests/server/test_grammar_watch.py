"""A call that takes too long is left alone; a grammar whose forced text has no end is refused wherever that hides."""

import hashlib
import json
import threading
import time

import pytest
import xgrammar

from tests.grammar.corpus import SCHEMAS
from tests.server.support import eventually
from tests.server.tiny import byte_tokenizer
from vmmkv.server.grammar.asked import of_schema
from vmmkv.server.grammar.compiling import Compilation
from vmmkv.server.grammar.least import MAX_BYTES, check_ends
from vmmkv.server.grammar.matcher import Matcher, WatchedMatcher
from vmmkv.server.grammar.vocabulary import Vocabulary
from vmmkv.server.grammar.watch import MAX_LEFT, OverTime, Watch, is_watched


def busy() -> bytes:
    """Half a second or more in C, without Python's lock, as in xgrammar."""
    return hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000)


def test_what_a_call_gives_or_raises_is_what_its_caller_has() -> None:
    watch = Watch()
    assert watch.run(lambda: (is_watched(), threading.get_ident()))[0] != (False, threading.get_ident())
    assert not is_watched()
    with pytest.raises(ZeroDivisionError):
        watch.run(lambda: 1 // 0)
    assert watch.run(lambda: 7)[0] == 7
    watch.close()


def test_nobody_waits_for_a_call_that_takes_too_long_and_the_next_is_made() -> None:
    watch = Watch()
    began_s = time.monotonic()
    with pytest.raises(OverTime, match="50 ms for one step"):
        watch.run(busy)
    waited_s = time.monotonic() - began_s
    assert watch.num_left == 1, f"after {waited_s} s it had ended"
    assert watch.run(lambda: "next")[0] == "next"
    assert eventually(lambda: watch.num_left == 0, within_s=30)
    watch.close()


def test_a_thread_that_has_had_no_time_is_waited_for() -> None:
    watch = Watch(0.01)
    assert watch.run(lambda: time.sleep(0.2) or "slept")[0] == "slept"  # type: ignore[func-returns-value]
    watch.close()


def test_only_so_many_work_on_for_nobody() -> None:
    watch = Watch(0.01)
    go = threading.Event()

    def spins() -> None:
        while not go.is_set():
            pass

    for _ in range(MAX_LEFT):
        with pytest.raises(OverTime, match="for one step"):
            watch.run(spins)
    with pytest.raises(OverTime, match="try again later"):
        watch.run(lambda: "next")
    go.set()
    assert eventually(lambda: watch.num_left == 0)
    assert watch.run(lambda: "next")[0] == "next"
    watch.close()


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), 258, [int(byte_tokenizer().eos_token_id)])


def test_a_matcher_under_watch_says_what_one_says_that_is_not(vocabulary: Vocabulary) -> None:
    compiled = xgrammar.GrammarCompiler(vocabulary.info).compile_regex("[ab]{2}(cdefgh)+[0-9]?")
    watch = Watch()
    plain, watched = Matcher(compiled, vocabulary), WatchedMatcher(compiled, vocabulary, watch)
    for token in [*vocabulary.rust.encode("ab", add_special_tokens=False).ids, 0]:
        assert (plain.mask() == watched.mask()).all() and plain.must_end() == watched.must_end()
        assert plain.accept(token) == watched.accept(token)
    assert plain.force(9) == watched.force(9) != []
    for at_most in (9, 1):
        assert plain.force(at_most) == watched.force(at_most) == []
        assert (plain.mask() == watched.mask()).all()
    assert watched.watched_s > 0
    watch.close()


def rules(kind: str, source: str) -> str:
    make = {
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": xgrammar.Grammar.from_ebnf,
        "json": lambda schema: xgrammar.Grammar.from_json_schema(schema, any_whitespace=False),
    }
    return str(make[kind](source).serialize_json())


DOUBLES = "\n".join(f"r{index} ::= r{index + 1} r{index + 1}" for index in range(30)) + '\nr30 ::= "a"'


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("ebnf", 'root ::= "a" root', "root never ends"),
        ("ebnf", 'root ::= [a-z]+ "0" x | "b"\nx ::= "a" y\ny ::= "b" x', "never ends"),
        ("ebnf", f'root ::= [a-z]+ r0 | "b"\n{DOUBLES}', "bytes at least"),
        ("regex", "(((abc){100}){100}){100}", "bytes at least"),
        ("json", json.dumps({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "never ends"),
        ("json", json.dumps({"type": "string", "pattern": "^((a{100}){100}){100}$"}), "bytes at least"),
        ("ebnf", "root ::= Token(5)", "not served"),
    ],
)
def test_forced_text_without_an_end_is_seen_wherever_it_hides(kind: str, source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_ends(rules(kind, source), lambda pattern: rules("regex", pattern))


def test_what_ends_is_let_through() -> None:
    sources = [("json", of_schema(schema).source) for schema in SCHEMAS.values()]
    chain = "root ::= r0\n" + "\n".join(f"r{index} ::= r{index + 1} | " + '"b"' for index in range(500)) + '\nr500 ::= "a"'
    sources += [("ebnf", 'root ::= "(" root ")" | ""'), ("regex", "(abc){4000}"), ("ebnf", chain)]
    for kind, source in sources:
        check_ends(rules(kind, source), lambda pattern: rules("regex", pattern))
    assert MAX_BYTES > 3 * 4000


def test_a_grammar_whose_forced_text_never_ends_is_refused_before_it_is_followed(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="never ends"):
        Compilation(vocabulary).compile("ebnf", 'root ::= [a-z]+ "0" x | "b"\nx ::= "a" x')
