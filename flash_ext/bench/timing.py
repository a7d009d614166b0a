"""Clocks: medians of interleaved runs with cold caches, host time of a call, and the ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Written over before each run. Twice an H200's 50 MiB L2; on CPUs more than two cores' share of L3.
FLUSH_BYTES = {"cuda": 128 << 20, "cpu": 32 << 20}
SECONDS = {"cuda": 0.25, "cpu": 1.0}  # of runs of one contestant, at most
MIN_RUNS, MAX_RUNS = 3, 30
HOST_BATCH, HOST_ROUNDS = 50, 20  # calls between two drains of the queue; how often

Run = Callable[[], object]


class Clock:
    """Times calls on one device. Nothing else may use the device meanwhile."""

    def __init__(self, device: torch.device):
        self.device = device
        self._flushed = torch.empty(FLUSH_BYTES[device.type], dtype=torch.int8, device=device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, run: Run) -> float:
        """Seconds of one call with the caches cold."""
        return self._round([run])[0]

    def _round(self, runs: list[Run]) -> list[float]:
        """Seconds of one call of each, the caches cold before each."""
        if self.device.type == "cpu":
            seconds = []
            for run in runs:
                self._flushed.fill_(1)
                begin = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - begin)
            return seconds
        # The host queues the whole round while the device sleeps, so no gap between two launches
        # is counted; 1e6 cycles are about half a millisecond.
        torch.cuda._sleep(1_000_000 * len(runs))
        events = []
        for run in runs:
            self._flushed.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            run()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1000 for begin, end in events]

    def medians(self, runs: dict[str, Run]) -> dict[str, float]:
        """Median seconds of each, by name. They take turns, so a throttling device slows all."""
        names = list(runs)
        first = dict(zip(names, self._round(list(runs.values())), strict=True))  # a warm-up too
        budget = SECONDS[self.device.type]
        samples = {name: [] for name in names}
        wanted = {
            name: int(min(MAX_RUNS, max(MIN_RUNS, budget / max(first[name], 1e-6))))
            for name in names
        }
        for turn in range(max(wanted.values())):
            # A slow contestant skips turns, spread over the whole time.
            due = [n for n in names if turn * wanted[n] % max(wanted.values()) < wanted[n]]
            due = due[turn % len(due) :] + due[: turn % len(due)]
            for name, seconds in zip(due, self._round([runs[n] for n in due]), strict=True):
                samples[name].append(seconds)
        return {name: statistics.median(taken) for name, taken in samples.items()}

    def host_medians(self, runs: dict[str, Run]) -> dict[str, float]:
        """Median seconds that a call keeps the host, by name; the queue is drained in between."""
        samples = {name: [] for name in runs}
        for _ in range(HOST_ROUNDS):
            for name, run in runs.items():
                self.synchronize()
                begin = time.perf_counter()
                for _ in range(HOST_BATCH):
                    run()
                samples[name].append((time.perf_counter() - begin) / HOST_BATCH)
        self.synchronize()
        return {name: statistics.median(taken) for name, taken in samples.items()}


def captured(call: Run) -> Run:
    """The call as a CUDA graph: its replay has no host time between two kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay():
        graph.replay()

    replay.call = call  # the graph reads tensors that only the call may hold: a page table, a bias
    return replay


def matmul_ceiling(clock: Clock) -> tuple[str, float]:
    """(what, TFLOP/s) of the device's own matrix product: bf16 8192³ on a GPU, fp32 2048³ else."""
    gpu = clock.device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if gpu else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=clock.device, dtype=dtype) for _ in range(2))
    seconds = clock.medians({"matmul": lambda: torch.mm(a, b)})["matmul"]
    return f"{'bf16' if gpu else 'fp32'} matrix product {size}³", 2 * size**3 / seconds / 1e12
