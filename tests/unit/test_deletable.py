"""The table of tests/deletable.py is true of this tree, so that a rename is found here and not in a nightly run."""

from pathlib import Path

import pytest

from bench.suites import SUITES
from tests import deletable
from tests.deletable import ROOMS, ROOT, Line, Room
from vmmkv_server.engine.engine import FEATURES

rooms = pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@rooms
def test_what_is_deleted_is_there(room: Room) -> None:
    every = [*room.paths, *(test for test in room.tests if "::" not in test)]
    assert [path for path in every if not (ROOT / path).exists()] == []
    for each in deletable.functions_of(room):
        file, _, name = each.partition("::")
        with pytest.raises(deletable.Broken, match="has 0 definitions"):
            deletable.without_definition(name, deletable.without_definition(name, text_of(file), file), file)


@rooms
def test_each_line_of_registration_is_there_once(room: Room) -> None:
    texts = {line.file: text_of(line.file) for line in room.lines}
    for line in room.lines:
        texts[line.file] = deletable.without(line, texts[line.file])


@rooms
def test_its_neighbours_tests_are_there_and_are_not_its_own(room: Room) -> None:
    assert room.neighbours
    files = {test.partition("::")[0] for test in room.neighbours}
    assert [file for file in files if not (ROOT / file).exists()] == []
    gone = [path for path in (*room.paths, *room.tests) if "::" not in path]
    assert [file for file in files if any(deletable.is_within(file, path) for path in gone)] == []


def test_every_feature_of_the_engine_is_a_room() -> None:
    modules = {path.stem for path in (ROOT / deletable.ENGINE / "features").glob("*.py")} - {"__init__"}
    assert modules <= {room.name for room in ROOMS}
    assert {kind.__module__.rpartition(".")[2] for kind in FEATURES} <= modules


def test_every_store_behind_a_network_is_a_room() -> None:
    modules = {path.stem for path in (ROOT / "vmmkv/tiers/contrib").glob("*.py")} - {"__init__"}
    assert modules and modules <= {room.name for room in ROOMS}


def test_every_suite_of_bench_is_a_room() -> None:
    assert {f"bench_{name}" for name in SUITES} == {room.name for room in ROOMS if room.name.startswith("bench_")}


def test_a_line_that_is_not_there_once_is_said() -> None:
    for text, count in (("", 0), ("one\none\n", 2)):
        with pytest.raises(deletable.Broken, match=f"has 'one' {count} times"):
            deletable.without(Line("file", "one"), text)


def test_whole_lines_go_unless_they_are_replaced() -> None:
    text = "first\n  second, third\nlast\n"
    assert deletable.without(Line("file", "second"), text) == "first\nlast\n"
    assert deletable.without(Line("file", "  second, third\n"), text) == "first\nlast\n"
    assert deletable.without(Line("file", "first\n  sec"), text) == "last\n"
    assert deletable.without(Line("file", "second, ", ""), text) == "first\n  third\nlast\n"


def test_a_definition_goes_with_its_decorators() -> None:
    text = "import this\n\n@wraps\n@other(\n    1\n)\ndef gone() -> None:\n    pass\n\nclass Stays:\n    def gone(self): ...\n"
    assert deletable.without_definition("gone", text, "file") == "import this\n\n\nclass Stays:\n    def gone(self): ...\n"
    assert deletable.without_definition("Stays", text, "file") == text[: text.index("class")]
    assert deletable.without_definition("Stays.gone", text, "file") == text[: text.index("    def gone(self)")]
    with pytest.raises(deletable.Broken, match="file has 0 definitions of missing"):
        deletable.without_definition("missing", text, "file")


def test_only_modules_of_other_packages_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    for name, text in (("needs", "import no_such_package.part"), ("broken", "from ours.gone import thing")):
        (tmp_path / f"ours/{name}.py").write_text(text)
    deletable.run(tmp_path, "-c", deletable.IMPORTS, "ours.needs")
    with pytest.raises(deletable.Broken, match=r"No module named 'ours\.gone'"):
        deletable.run(tmp_path, "-c", deletable.IMPORTS, "ours.needs", "ours.broken")
