from __future__ import annotations

import threading

from lifeboat_cache.store.workers import WorkerPool


def test_loads_run_before_stores_that_wait() -> None:
    pool = WorkerPool(1)
    go_on, busy, done = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        busy.set()
        assert go_on.wait(60)

    pool.submit("store", [first])
    assert busy.wait(60)
    pool.submit("store", [lambda: order.append("store"), done.set])
    pool.submit("load", [lambda: order.append("load 1"), lambda: order.append("load 2")])
    go_on.set()
    assert done.wait(60)
    assert order == ["load 1", "load 2", "store"]
    pool.stop()


def test_a_task_that_raises_does_not_take_its_thread_away() -> None:
    pool = WorkerPool(1)
    done = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError

    pool.submit("load", [broken, broken, done.set])
    assert done.wait(60)
    pool.stop()


def test_threads_end_once_the_queues_are_empty() -> None:
    pool = WorkerPool(3)
    assert pool.threads == 3
    ran: list[int] = []
    pool.submit("store", [lambda: ran.append(1)] * 50)
    pool.stop()
    for thread in pool._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(ran) == 50


def test_there_is_always_a_thread() -> None:
    assert WorkerPool(0).threads == 1
