"""Exactness: an interrupted, resized run against an uninterrupted one."""

import node


def test_a_run_completes(folder, parent, trainer):
    outcome = node.Job(folder, parent, trainer).run(world=3)
    print(outcome)
    assert outcome.codes == {0: 0, 1: 0, 2: 0}, outcome.output
