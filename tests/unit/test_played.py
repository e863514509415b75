from __future__ import annotations

import time

from penstock.played import AT_TOOL, GENERATED, JUDGED, MAX_SPANS, QUEUED, read_played, with_span


def test_a_span_has_its_stage_when_it_began_and_its_seconds() -> None:
    now = time.time()
    packed = with_span(with_span(b"", QUEUED, 1.5, ago_s=4.0), GENERATED, 4.0)
    queue, generate = read_played(packed)
    assert (queue.stage, queue.seconds, generate.stage, generate.seconds) == ("queue", 1.5, "generate", 4.0)
    assert now - 5.5 <= queue.began and abs(generate.began - queue.began - 1.5) < 1.0


def test_what_is_too_short_to_see_is_left_out() -> None:
    assert with_span(b"", JUDGED, 0.0001) == b""


def test_after_very_many_spans_the_rest_is_one() -> None:
    packed = b""
    for _ in range(3 * MAX_SPANS):
        packed = with_span(packed, AT_TOOL, 0.5)
    spans = read_played(packed)
    assert len(spans) == MAX_SPANS + 1 and {span.stage for span in spans[:-1]} == {"tool"}
    assert spans[-1].stage == "more" and spans[-1].seconds >= 0.5
