"""A run as OpenTelemetry sees it: a trace for every train step and every evaluation, with the stages as spans in it.

One trace per step, and not one per run: it is complete when the step is, also in a run that is killed later. What
happens meanwhile (weights published, an engine fenced, a warning) is an event of the span that is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode

from penstock.events import (
    UNENDED_STAGES,
    BatchTaken,
    EngineSeen,
    Event,
    RunEnded,
    StageBegan,
    StageEnded,
    StepGivenBack,
    StepTrained,
    TaskProgress,
)

TRAINER = "trainer"


def otlp_provider(endpoint: str, headers: Mapping[str, str], *, service_name: str, timeout_s: float) -> TracerProvider:
    """Sends in a thread of its own; what a collector does not take is dropped."""
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, headers=dict(headers), timeout=timeout_s)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Spans:
    """A sink of the run's events."""

    def __init__(self, provider: TracerProvider, *, run_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("penstock")
        self._run_name = run_name
        self._open: dict[str, list[tuple[str, Span]]] = {}
        """By lane, the outermost first."""

    def notice(self, event: Event) -> None:
        match event:
            case StageBegan():
                self._begin(event)
            case StageEnded():
                self._end(event.lane, event.stage)
            case StepTrained():
                for name, value in event.metrics.items():
                    self._set(name, value)
            case StepGivenBack():
                self._tell(event)
                self._fail(event.reason)
            case RunEnded():
                if event.error is not None:
                    self._fail(event.error)
                for lane in list(self._open):
                    self._end_all(lane)
            case TaskProgress() | BatchTaken() | EngineSeen():
                pass
            case _:
                self._tell(event)

    def close(self) -> None:
        for lane in list(self._open):
            self._end_all(lane)
        self._provider.shutdown()

    def _begin(self, event: StageBegan) -> None:
        if event.stage in UNENDED_STAGES:
            return
        opened = self._open.setdefault(event.lane, [])
        context = trace.set_span_in_context(opened[-1][1]) if opened else None
        attributes: dict[str, Any] = {"penstock.run": self._run_name, "penstock.lane": event.lane}
        if event.train_step is not None:
            attributes["penstock.train_step"] = event.train_step
        opened.append((event.stage, self._tracer.start_span(event.stage, context=context, attributes=attributes)))

    def _end(self, lane: str, stage: str) -> None:
        opened = self._open.get(lane, [])
        if not any(name == stage for name, _ in opened):
            return
        while opened:
            name, span = opened.pop()
            span.end()
            if name == stage:
                return

    def _end_all(self, lane: str) -> None:
        for _, span in reversed(self._open.pop(lane, [])):
            span.end()

    def _set(self, name: str, value: float) -> None:
        if opened := self._open.get(TRAINER):
            opened[0][1].set_attribute(name, value)

    def _tell(self, event: Event) -> None:
        if opened := self._open.get(TRAINER):
            told = msgspec.to_builtins(event)
            plain = {name: value for name, value in told.items() if isinstance(value, str | int | float)}
            opened[-1][1].add_event(str(told["kind"]), plain)

    def _fail(self, reason: str) -> None:
        if opened := self._open.get(TRAINER):
            opened[0][1].set_status(StatusCode.ERROR, reason)
