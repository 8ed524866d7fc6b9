"""Rules of the suite: a long-only case names its test in the gate, the longest file starts first."""

from __future__ import annotations

from builders.suite import Case, breaches, longest_first, slow, written

HERE = "tests/unit/repository/test_suite.py"


def test_a_long_case_whose_law_is_in_the_gate_is_in_order() -> None:
    gate = [Case(f"{HERE}::test_a"), Case(f"{HERE}::test_b[1]")]
    laws = [f"{HERE}::test_a", f"{HERE}::test_b", f"{HERE}::test_b[1]"]
    assert breaches([*gate, *(Case(f"{HERE}::test_c[{law}]", law) for law in laws)]) == []


def test_a_long_case_without_its_law_is_told() -> None:
    gate = [Case(f"{HERE}::test_a"), Case(f"{HERE}::test_b[1]")]
    long = f"{HERE}::test_c"

    def told(law: str) -> list[str]:
        return breaches([*gate, Case(f"{HERE}::test_b[2]", f"{HERE}::test_a"), Case(long, law)])

    assert told("") == [f"{long} names no test of the gate"]
    assert told(f"{HERE}::test_z") == [f"{long} names {HERE}::test_z, and there is no such test"]
    assert told(f"{HERE}::test_b[2]") == [f"{long} names {HERE}::test_b[2], which is of the long suite itself"]
    assert told(long) == [f"{long} names {long}, which is of the long suite itself"]
    assert told("tests/none.py::test_a") == [f"{long} names a test of tests/none.py, and there is no such file"]


def test_a_law_of_a_file_that_was_not_asked_for_may_be_there() -> None:
    assert breaches([Case(f"{HERE}::test_c", "tests/unit/protocol/test_wire.py::test_x")]) == []


def test_the_longest_file_is_begun_first() -> None:
    ids = ["short::a", "long::a", "long::b", "one::a"]
    assert longest_first(ids, {"one::a": 10.0, "long::a": 6.0, "long::b": 6.0}) == ["long", "one", "short"]


def test_a_slow_newcomer_and_a_test_that_has_become_slow_are_named() -> None:
    took = {"a": 9.0, "b": 11.0, "c": 11.0, "d": 99.0, "e": 101.0}
    assert slow({"c": 6.0, "d": 50.0, "e": 50.0}, took) == [" 101.0 s, was 50 s: e", "  11.0 s, is new: b"]


def test_times_of_tests_that_are_gone_or_quick_are_forgotten() -> None:
    mine = f"{HERE}::test_times_of_tests_that_are_gone_or_quick_are_forgotten"
    times = {"tests/none.py::test_a": 9.0, f"{HERE}::test_gone": 9.0, f"{mine}[kept]": 9.0, f"{mine}[quick]": 9.0}
    assert written(times, {f"{mine}[quick]": 0.1, f"{mine}[new]": 7.77}) == {f"{mine}[kept]": 9.0, f"{mine}[new]": 7.8}
