"""Places of answers: how many there are, and how long a client is told to wait."""

from __future__ import annotations

import pytest

from erniekit.config.sections.serving import ServingParameters
from erniekit.inference.engine import ChatModel
from erniekit.serving import places as module
from erniekit.serving.errors import RefusedError
from erniekit.serving.places import Places
from erniekit.serving.served import Served
from tests.serving.asking import ask, serving
from tests.serving.conftest import TINY_ERNIE


def test_places_are_taken_and_given_back() -> None:
    places = Places(2, 1)
    with places.take(2), places.take():
        assert places.taken == 3
        with pytest.raises(RefusedError) as caught, places.take():
            pass
        assert caught.value.status == 429 and caught.value.retry_after == 1
    assert places.taken == 0
    with pytest.raises(ValueError, match="x"), places.take():
        raise ValueError("x")
    assert places.taken == 0


def test_the_wait_follows_how_long_answers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    places = Places(1, 9)
    for _ in range(50):
        with places.take():
            clock[0] += 20
    with places.take(10), pytest.raises(RefusedError) as caught, places.take():
        pass
    assert caught.value.retry_after == 180  # nine answers of 20 s are before it


@pytest.mark.proves("max_num_seqs", "max_waiting_requests")
def test_the_parameters_say_how_many(served: Served) -> None:
    defaults = ServingParameters()
    assert served.places._running == 4 and served.engine._scheduler._max_running == 4
    with serving(
        lambda: ChatModel.load(TINY_ERNIE, random_weights=True), max_num_seqs=2, max_waiting_requests=0
    ) as own:
        assert own.engine._scheduler._max_running == 2 != defaults.max_num_seqs
        with own.places.take(2):
            asked = ask(own, "/v1/completions", {"prompt": "x"})
        assert asked.status_code == 429 and defaults.max_waiting_requests > 0
