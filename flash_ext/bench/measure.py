"""Measures a group of points: one function for each kind of figure."""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_ext import reference

from . import peers, results, timing
from .grid import Point
from .timing import Clock


class Bench:
    """A device and its clock; collects what failed, since a failure never ends the run."""

    def __init__(self, device: torch.device, only_peers: tuple[str, ...] | None = None):
        self.device = device
        self.clock = Clock(device)
        self.only_peers = only_peers  # None: all
        self.failures: dict[str, str] = {}  # "who at which point": why
        self.ceiling: float | None = None  # TFLOP/s

    def measure(self, group: list[Point]) -> list[dict]:
        """The rows of a group; a point that ours cannot run has none, its reason is noted."""
        try:
            mode = group[0].mode
            if mode.startswith("host"):
                return self._host(group)
            if mode.endswith("error"):
                return self._errors(group)
            if mode.startswith("memory"):
                return self._memory(group)
            return self._times(group)
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _try(self, who: str, point: Point, function: Callable):
        """function() or, when it fails, None with the reason noted."""
        try:
            return function()
        except torch.OutOfMemoryError:
            reason = "out of memory"
        except Exception as error:  # whatever a peer raises
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
            if isinstance(error, peers.NotHere):
                reason = str(error)
        self.failures[f"{who} at {point}"] = reason
        return None

    def _peer_names(self, point: Point) -> list[str]:
        names = peers.peer_names(point, self.device)
        return [n for n in names if self.only_peers is None or n in (*self.only_peers, "op")]

    def _row(self, point: Point, kernel: str, figures: dict[str, float]) -> dict:
        row = point.row() | {name: float(f"{x:.4g}") for name, x in figures.items()}
        row |= {"kernel": kernel, "sources": results.fingerprint(kernel)}
        if self.ceiling and point.unit == "TFLOP/s":
            row["ceiling"] = float(f"{self.ceiling:.4g}")
        return row | {"date": datetime.date.today().isoformat()}

    # ---- device time -----------------------------------------------------------------------------

    def _prepared(self, point: Point, t: peers.Tensors, who: str) -> Callable | None:
        """A call that has run once, so that its first one's costs are paid."""

        def prepare():
            call = peers.ours(point, t) if who == "ours" else peers.peer(who, point, t)
            if point.backward and not (point.lengths and who != "ours"):
                call = peers.backward_of(call, t)
            elif not point.backward:
                call = torch.no_grad()(call)
            call()
            self.clock.synchronize()
            if point.mode == "decode" and self.device.type == "cuda":
                return timing.captured(call)
            return call

        return self._try(who, point, prepare)

    def _times(self, group: list[Point]) -> list[dict]:
        calls, kernels, t = {}, {}, None
        for index, point in enumerate(group):
            if not (t and point.mode == "decode"):  # a group's caches are one: they may be huge
                t = peers.make_tensors(point, self.device)
            kernels[index] = self._try("ours", point, lambda p=point, t=t: peers.served_by(p, t))
            if kernels[index] is None:
                continue
            for who in ("ours", *self._peer_names(point)):
                call = self._prepared(point, t, who)
                if call is not None:
                    calls[index, who] = call
                elif who == "ours":
                    break
        if not calls:
            return []
        seconds = self._try("timing", group[0], lambda: self.clock.medians(calls)) or {}
        rows = []
        for index, point in enumerate(group):
            if (index, "ours") not in seconds:
                continue
            figures = {who: point.rate(s) for (at, who), s in seconds.items() if at == index}
            if index and (0, "ours") in seconds:  # at its own rate, that of the group's first call
                figures["plain"] = group[0].rate(seconds[0, "ours"])
            rows.append(self._row(point, kernels[index], figures))
        return rows

    # ---- host time -------------------------------------------------------------------------------

    def _host(self, group: list[Point]) -> list[dict]:
        (point,) = group
        t = peers.make_tensors(point, self.device)
        kernel = self._try("ours", point, lambda: peers.served_by(point, t))
        if kernel is None:
            return []

        def prepared(who):
            call = peers.host_ours(point, t) if who == "ours" else peers.host_peer(who, point, t)
            if point.backward:
                call = peers.both_passes(call, t)
            for _ in range(20):
                call()
            return call

        grad = contextlib.nullcontext() if point.backward else torch.no_grad()
        with grad, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            names = ("ours", *self._peer_names(point))
            calls = {n: self._try(n, point, lambda n=n: prepared(n)) for n in names}
            calls = {name: call for name, call in calls.items() if call is not None}
            if "ours" not in calls:
                return []
            seconds = self.clock.host_medians(calls)
        return [self._row(point, kernel, {n: 1e6 * s for n, s in seconds.items()})]

    # ---- errors ----------------------------------------------------------------------------------

    def _errors(self, group: list[Point]) -> list[dict]:
        """RMS and largest difference from fp64 attention over the same inputs."""
        point = group[0]
        t = peers.make_tensors(point, self.device)
        kernel = self._try("ours", point, lambda: peers.served_by(point, t))
        if kernel is None:
            return []
        exact = reference.attention(t.q, t.k, t.v, causal=point.causal)[0]
        figures: dict[str, dict[str, float]] = {"rms": {}, "max": {}}
        for who in ("ours", *self._peer_names(point)):
            call = self._prepared(point, t, who)
            if call is None:
                continue
            error = call().double() - exact
            figures["rms"][who] = error.square().mean().sqrt().item()
            figures["max"][who] = error.abs().max().item()
        return [
            self._row(p, kernel, figures[p.mode.split("_")[0]])
            for p in group
            if "ours" in figures["rms"]
        ]

    # ---- memory ----------------------------------------------------------------------------------

    def _memory(self, group: list[Point]) -> list[dict]:
        """MiB at the peak above the inputs, results included; a backward one above the forward."""
        (point,) = group
        if self.device.type != "cuda":
            self.failures[f"ours at {point}"] = "torch counts no memory on CPUs"
            return []
        t = peers.make_tensors(point, self.device)
        kernel = self._try("ours", point, lambda: peers.served_by(point, t))
        if kernel is None:
            return []
        figures = {}
        for who in ("ours", *self._peer_names(point)):
            call = self._prepared(point, t, who)
            if call is None:
                continue
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            call()
            figures[who] = (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
        return [self._row(point, kernel, figures)] if "ours" in figures else []
