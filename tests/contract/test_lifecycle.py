"""Close never meets a running call."""

from __future__ import annotations

import threading

from hicache_shared.lifecycle import CallGate


def test_close_waits_for_a_running_call() -> None:
    gate, inside, leave, closed = CallGate(), threading.Event(), threading.Event(), []

    def call() -> None:
        with gate.call() as is_open:
            assert is_open
            inside.set()
            leave.wait(10)

    caller = threading.Thread(target=call)
    closer = threading.Thread(target=lambda: closed.append(gate.close(10)))
    caller.start()
    assert inside.wait(10)
    closer.start()
    assert not closed
    leave.set()
    closer.join(10)
    caller.join(10)
    assert closed == [True]


def test_close_gives_up_on_a_call_that_does_not_end() -> None:
    gate = CallGate()
    with gate.call():
        assert not gate.close(0.01)


def test_no_call_enters_a_closed_gate() -> None:
    gate = CallGate()
    assert gate.close(0)
    with gate.call() as is_open:
        assert not is_open
    assert gate.close(0), "a refused call is not counted"


def test_a_call_that_raises_leaves_the_gate() -> None:
    gate = CallGate()
    try:
        with gate.call():
            raise KeyError
    except KeyError:
        pass
    assert gate.close(0)
