"""The thread of a training: steps, and jobs between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tensorvine.actors.training.loop import TrainingLoop
from tensorvine.actors.training.trainers import first_failure, root_cause
from tensorvine.store.errors import OperationTimeoutError, PeerLostError, ShardUnavailableError

SOON_S = 30.0


class Steps:
    """A training whose steps end when they are told to."""

    def __init__(self) -> None:
        self.steps_done = 0
        self.begun = [threading.Event() for _ in range(50)]
        self.may_end = [threading.Event() for _ in range(50)]
        self.threads: set[int] = set()
        self.fails_at = 0

    def step(self) -> float:
        number = self.steps_done + 1
        self.threads.add(threading.get_ident())
        self.begun[number].set()
        assert self.may_end[number].wait(SOON_S)
        if number == self.fails_at:
            raise KeyError("labels")
        self.steps_done = number
        return float(number)

    def freely(self, until: int = 49) -> None:
        for event in self.may_end[: until + 1]:
            event.set()


@pytest.fixture
def failures() -> list[BaseException]:
    return []


@pytest.fixture
def loop(failures: list[BaseException]) -> Iterator[TrainingLoop]:
    made = TrainingLoop("rank 0 of 'run'", failures.append)
    made.training = steps = Steps()
    yield made
    steps.freely()
    assert made.close(SOON_S)


def steps_of(loop: TrainingLoop) -> Any:
    return loop.training


def at(loop: TrainingLoop, step: int | None = None) -> Future[int]:
    """A job that tells after which step it was carried out."""
    return loop.at_boundary(lambda: steps_of(loop).steps_done, step)


def test_a_train_gives_the_losses_of_its_steps(loop):
    steps_of(loop).freely()
    assert loop.run(3).result(SOON_S) == [1.0, 2.0, 3.0]
    assert loop.run(2).result(SOON_S) == [4.0, 5.0]
    assert loop.steps_trained == 5
    assert loop.step_s > 0
    assert not loop.busy


def test_a_second_train_is_refused_and_says_how_far_the_first_is(loop):
    steps_of(loop).freely(1)
    first = loop.run(3)
    assert steps_of(loop).begun[2].wait(SOON_S)
    assert loop.busy
    with pytest.raises(ValueError, match=r"rank 0 of 'run': train: expected no training in progress; 1 of 3 steps"):
        loop.run(1)
    steps_of(loop).freely()
    assert first.result(SOON_S) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None])
def test_a_train_of_no_number_of_steps_is_refused(loop, steps):
    with pytest.raises(ValueError, match="expected at least 1 step"):
        loop.run(steps)


def test_jobs_are_carried_out_between_steps_in_the_thread_that_trains(loop):
    train = loop.run(3)
    assert steps_of(loop).begun[1].wait(SOON_S)
    job, where = at(loop), loop.at_boundary(threading.get_ident)
    assert not job.done()
    steps_of(loop).freely()
    assert job.result(SOON_S) == 1
    train.result(SOON_S)
    assert steps_of(loop).threads == {where.result(SOON_S)}


def test_a_job_is_carried_out_after_the_step_it_is_for(loop):
    train = loop.run(5)
    assert steps_of(loop).begun[1].wait(SOON_S)
    jobs = [at(loop, 4), at(loop, 2), at(loop, 1)]
    steps_of(loop).freely()
    assert [job.result(SOON_S) for job in jobs] == [4, 2, 1]
    train.result(SOON_S)


def test_a_job_for_a_step_that_is_past_is_refused(loop):
    train = loop.run(5)
    steps_of(loop).freely(2)
    assert steps_of(loop).begun[3].wait(SOON_S)
    for past in (0, 1, 2):
        with pytest.raises(ValueError, match=f"expected step 3 or later, as it has begun; found {past}"):
            at(loop, past)
    job = at(loop, 3)
    steps_of(loop).freely()
    assert job.result(SOON_S) == 3
    train.result(SOON_S)


def test_without_a_train_jobs_are_carried_out_at_once(loop):
    assert at(loop).result(SOON_S) == 0
    assert at(loop, 17).result(SOON_S) == 0


def test_a_job_waits_for_its_step_while_a_train_that_was_announced_has_yet_to_come(loop):
    loop.announce(1)
    assert loop.busy
    job, now = at(loop, 2), at(loop)
    assert now.result(SOON_S) == 0
    assert not job.done()
    train = loop.run(3)
    loop.came(1)
    steps_of(loop).freely()
    assert job.result(SOON_S) == 2
    train.result(SOON_S)
    loop.announce(2)
    with pytest.raises(ValueError, match="expected step 3 or later, as it has begun; found 2"):
        at(loop, 2)
    job = at(loop, 9)
    loop.came(2)
    assert job.result(SOON_S) == 3
    loop.announce(1)
    assert not loop.busy


def test_what_waits_for_a_train_that_does_not_come_is_carried_out_when_the_thread_ends(loop):
    loop.announce(1)
    job = at(loop, 9)
    assert loop.close(SOON_S)
    assert job.result(0) == 0


def test_a_job_for_a_step_that_the_train_does_not_reach_is_carried_out_at_its_end(loop):
    train = loop.run(2)
    job = at(loop, 17)
    steps_of(loop).freely()
    assert job.result(SOON_S) == 2
    assert train.result(SOON_S) == [1.0, 2.0]


def test_a_job_of_a_job_is_carried_out_before_the_next_step(loop):
    inner: list[Future[int]] = []
    train = loop.run(2)
    assert steps_of(loop).begun[1].wait(SOON_S)
    loop.at_boundary(lambda: inner.append(at(loop)))
    steps_of(loop).freely()
    train.result(SOON_S)
    assert inner[0].result(SOON_S) == 1


def test_a_job_that_fails_fails_its_caller_only(loop, failures):
    steps_of(loop).freely()
    with pytest.raises(ZeroDivisionError):
        loop.at_boundary(lambda: 1 // 0).result(SOON_S)
    assert loop.run(1).result(SOON_S) == [1.0]
    assert failures == []


def test_a_job_that_was_given_up_is_not_carried_out(loop):
    train = loop.run(1)
    assert steps_of(loop).begun[1].wait(SOON_S)
    done: list[int] = []
    assert loop.at_boundary(lambda: done.append(1)).cancel()
    steps_of(loop).freely()
    train.result(SOON_S)
    assert at(loop).result(SOON_S) == 1
    assert done == []


def test_a_step_that_fails_ends_the_train_and_the_next_one_tries_again(loop, failures):
    steps_of(loop).freely()
    steps_of(loop).fails_at = 3
    with pytest.raises(KeyError, match="labels"):
        loop.run(5).result(SOON_S)
    assert [type(error) for error in failures] == [KeyError]
    steps_of(loop).fails_at = 0
    assert loop.run(2).result(SOON_S) == [3.0, 4.0]


def test_data_that_have_come_to_their_end_are_an_error_that_can_be_awaited(loop, failures):
    steps_of(loop).step = lambda: next(iter(()))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(in_loop(lambda: loop.run(1)), SOON_S))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(in_loop(lambda: loop.at_boundary(lambda: next(iter(())))), SOON_S))
    assert [type(error) for error in failures] == [RuntimeError]


async def in_loop(begin: Any) -> Any:
    return await asyncio.wrap_future(begin())


def test_a_train_without_a_training_says_so(failures):
    loop = TrainingLoop("rank 0 of 'run'", failures.append)
    with pytest.raises(ValueError, match="expected a training that was built"):
        loop.run(1).result(SOON_S)
    assert loop.close(SOON_S)


def test_stop_ends_the_train_at_the_next_boundary(loop):
    train = loop.run(40)
    assert steps_of(loop).begun[1].wait(SOON_S)
    loop.stop()
    steps_of(loop).freely()
    assert train.result(SOON_S) == [1.0]
    loop.stop()
    assert loop.run(2).result(SOON_S) == [2.0, 3.0], "a stop between trains stops none"


def test_stop_by_a_job_ends_the_train_after_that_step(loop):
    train = loop.run(40)
    loop.at_boundary(loop.stop, 3)
    steps_of(loop).freely()
    assert train.result(SOON_S) == [1.0, 2.0, 3.0]


def test_closing_ends_the_train_carries_out_what_waits_and_refuses_the_rest(loop):
    train = loop.run(40)
    assert steps_of(loop).begun[1].wait(SOON_S)
    job = at(loop, 30)
    assert not loop.close(0.01), "the step goes on"
    steps_of(loop).freely()
    assert loop.close(SOON_S)
    assert train.result(SOON_S) == [1.0]
    assert job.result(SOON_S) == 1
    for refused in (lambda: loop.run(1), lambda: at(loop)):
        with pytest.raises(PeerLostError, match=r"rank 0 of 'run': .*closed"):
            refused()


def test_jobs_of_many_threads_are_all_carried_out_once(loop):
    steps_of(loop).freely()
    done: list[int] = []
    train = loop.run(40)
    askers = [
        threading.Thread(target=lambda n=n: [loop.at_boundary(lambda k=k: done.append(100 * n + k)) for k in range(50)])
        for n in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(SOON_S)
    train.result(SOON_S)
    at(loop).result(SOON_S)
    assert sorted(done) == [100 * n + k for n in range(4) for k in range(50)]
    assert all(done.index(100 * n + 1) < done.index(100 * n + 2) for n in range(4))


# ---- answers of several ranks --------------------------------------------------------------------------------


def raising(error: BaseException, after: threading.Event | None = None) -> Any:
    def wait() -> None:
        if after is not None:
            assert after.wait(SOON_S)
        raise error

    return wait


def test_a_failure_ends_the_wait_for_the_others():
    never = threading.Event()
    answers, failed = first_failure([lambda: never.wait(SOON_S), raising(KeyError("x"))], SOON_S)
    never.set()
    assert answers == [None, None]
    assert [(place, type(error)) for place, error in failed] == [(1, KeyError)]


def test_who_only_noticed_a_failure_leaves_time_for_the_cause():
    late = threading.Event()
    lost, died = PeerLostError("rank 1 left"), ShardUnavailableError("rank 1 died")
    timer = threading.Timer(0.05, late.set)
    timer.start()
    _, failed = first_failure([raising(lost), raising(died, late)], SOON_S)
    assert failed == [(0, lost), (1, died)]
    assert root_cause(failed) == (1, died)


def test_a_cause_that_does_not_come_up_is_not_waited_for_for_ever():
    never = threading.Event()
    _, failed = first_failure([raising(PeerLostError("x")), lambda: never.wait(SOON_S)], 0.05)
    never.set()
    assert [place for place, _ in failed] == [0]


def test_the_cause_is_what_went_wrong_by_itself():
    errors = [OperationTimeoutError("t"), PeerLostError("l"), ShardUnavailableError("d"), KeyError("k")]
    for count in range(1, 5):
        assert root_cause(list(enumerate(errors[:count]))) == (count - 1, errors[count - 1])
