"""Sentences with a number are correct for 0, 1 and many."""

from concertina.amounts import amount, are


def test_one_is_singular_and_all_other_numbers_are_plural() -> None:
    assert [f"{amount(n, 'pod')} {are(n)} left" for n in (0, 1, 2)] == [
        "0 pods are left",
        "1 pod is left",
        "2 pods are left",
    ]
