import os
import signal
from collections.abc import Iterator

import pytest

from pretrain.resilience.signals import Signals
from pretrain.resilience.wishes import Stop


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_sigusr1_counts_from_the_first_moment() -> None:
    signals = Signals()
    send(signal.SIGUSR1)
    assert (signals.stop, signals.name) == (Stop.SIGNAL, "SIGUSR1")
    assert signals.received_at is not None


def test_before_training_an_interrupt_ends_at_once() -> None:
    Signals()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_repeated_signals_change_nothing() -> None:
    signals = Signals()
    signals.arm(speaks=False)
    send(signal.SIGTERM)
    first = signals.received_at
    for _ in range(3):
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
    assert (signals.stop, signals.name, signals.received_at) == (Stop.SIGNAL, "SIGTERM", first)


def test_the_second_ctrl_c_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    signals = Signals()
    signals.arm(speaks=True)
    send(signal.SIGINT)
    assert signals.stop == Stop.INTERRUPT
    assert capfd.readouterr().err.count("stopping after this step") == 1
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_an_interrupt_outranks_a_signal_and_stays() -> None:
    signals = Signals()
    signals.arm(speaks=False)
    send(signal.SIGUSR1)
    send(signal.SIGINT)
    send(signal.SIGUSR1)
    assert (signals.stop, signals.name) == (Stop.INTERRUPT, "SIGINT")


def test_once_all_is_saved_nothing_kills() -> None:
    signals = Signals()
    signals.arm(speaks=False)
    signals.rest()
    # Python gives handlers of its own back to the system when it ends; what is ignored stays ignored.
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == [signal.SIG_IGN] * 2
    send(signal.SIGTERM)
    assert signals.stop == Stop.NO


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = Signals()
    signals.arm(speaks=False)
    send(signal.SIGINT)
    assert signals.stop == Stop.NO
