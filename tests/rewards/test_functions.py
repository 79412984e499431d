"""Rewards in processes of their own: what functions get and give, and what happens when they fail."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erniekit.rewards import process
from erniekit.rewards.rewards import RewardError, Rewards
from tests.rewards.asking import answer, opened

SHORT = 2.5  # seconds; what answers at all does so in less, also beside other tests
pytestmark = pytest.mark.distributed  # it starts processes
Write = Callable[..., Rewards]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Write]:
    """Write a function `score` with this body, and open it as a reward."""
    made: list[Rewards] = []

    def write(source: str, name: str = "score", **values: Any) -> Rewards:
        file = tmp_path / f"functions_{len(made)}.py"
        file.write_text(textwrap.dedent(source))
        made.append(opened(f"python:{file}:{name}", **values))
        return made[-1]

    yield write
    for rewards in made:
        rewards.close()


def failure(rewards: Rewards, *texts: str, **record: Any) -> str:
    """What the error says of these answers, at lines 1, 2, ... of the data."""
    with pytest.raises(RewardError) as info:
        rewards.score([answer(text, number, **record) for number, text in enumerate(texts, 1)])
    return str(info.value)


def test_a_function_of_all_answers_gets_columns(written: Write) -> None:
    rewards = written("""
        def score(completions, prompts, references, level, missing=None, **columns):
            assert missing is None and columns == {"answer": ["5", "6"], "other": [None, 1]}, columns
            assert all(prompt[-1]["content"] == "2 + 3" for prompt in prompts)
            return [float(c == r) + one for c, r, one in zip(completions, references, level)]
    """)
    assert rewards.names == ("score",)
    records = [answer("5", answer="5", level=1), answer("5", answer="6", level=2, other=1)]
    assert rewards.score(records).tolist() == [[2.0], [2.0]]


def test_a_function_of_one_answer_gets_its_record(written: Write) -> None:
    rewards = written("""
        def score(completion, prompt, reference, level=0):
            return len(prompt) + (completion == reference) + level
    """)
    assert rewards.score([answer("5", answer="5"), answer("5", answer="6", level=2)]).tolist() == [[2], [3]]


def test_functions_of_verl_run_as_they_are(written: Write) -> None:
    rewards = written("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "gsm8k" and extra_info == {"index": 3}
            return 1.0 if solution_str == ground_truth else 0.0
    """, "compute_score")  # fmt: skip
    record = {"data_source": "gsm8k", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 3}}
    assert rewards.score([answer("5", **record), answer("6", **record)]).tolist() == [[1], [0]]


def test_classes_of_ms_swift_run_as_they_are(written: Write) -> None:
    rewards = written("""
        class Score:
            def __call__(self, completions, solution, **kwargs):
                return [float(c == s) for c, s in zip(completions, solution)]
    """, "Score")  # fmt: skip
    assert rewards.score([answer("5", solution="5"), answer("6", solution="5")]).tolist() == [[1], [0]]


def test_modules_are_found_on_the_path_and_beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("def one(completion): return 1\n")
    (tmp_path / "my_rewards.py").write_text("from beside_it import one\n")
    monkeypatch.chdir(tmp_path)
    rewards = opened("python:my_rewards.one", "two=python:my_rewards.py:one")
    assert rewards.names == ("one", "two")
    assert rewards.score([answer("a")]).tolist() == [[1, 1]]
    rewards.close()


@pytest.fixture(scope="module")
def returning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewards]:
    """Functions that give what the field `returned` of the first record says."""
    file = tmp_path_factory.mktemp("rewards") / "returning.py"
    file.write_text(
        "import numpy\n"
        "def score(completions, returned): return eval(returned[0])\n"
        "def one(completion, returned): return eval(returned)\n"
    )
    rewards = opened(f"python:{file}:score")
    yield rewards
    rewards.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[True, 2]", [1, 2]),
        ("(0.5, 1)", [0.5, 1]),
        ("numpy.float32([0.5, 1])", [0.5, 1]),
        ("[numpy.int64(3), 1]", [3, 1]),
    ],
)
def test_numbers_of_every_kind(given: str, expected: list[float], returning: Rewards) -> None:
    answers = [answer("a", returned=given), answer("b")]
    assert returning.score(answers).ravel().tolist() == expected


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("0.5", "gives one number, 0.5, for 3 answers (the first to data.jsonl:1, the last to data.jsonl:3)"),
        ("numpy.float64(1)", "gives one number, 1, for 3 answers"),
        ("[1, 2]", "gives 2 numbers for 3 answers"),
        ("[1, 2, 3, 4]", "gives 4 numbers for 3 answers"),
        ("[]", "gives 0 numbers for 3 answers"),
        ("[1, 2, 3, None]", "gives more than 3 numbers for 3 answers"),
        ("None", "gives nothing (None) for 3 answers"),
        ("'high'", "gives a str for 3 answers"),
        ("[1, float('nan'), 3]", "gives nan for the answer 'b' to data.jsonl:2"),
        ("[1, 2, float('inf')]", "gives inf for the answer 'c' to data.jsonl:3"),
        ("[1, None, 3]", "gives nothing (None) for the answer 'b' to data.jsonl:2"),
        ("[1, '2', 3]", "gives a str for the answer 'b' to data.jsonl:2"),
        ("[[1], [2], [3]]", "gives a list for the answer 'a' to data.jsonl:1"),
        ("[{'score': 1}, 2, 3]", "gives a dict with the key 'score' for the answer 'a' to data.jsonl:1"),
        ("[10 ** 400, 2, 3]", "gives a number that is too large for the answer 'a' to data.jsonl:1"),
    ],
)
def test_what_is_no_list_of_numbers_is_told(returned: str, told: str, returning: Rewards) -> None:
    said = failure(returning, "a", "b", "c", returned=returned)
    assert said.startswith(f"reward score: it {told}") and "erniekit rewards CONFIG" in said


def test_a_number_that_is_none_of_one_answer_is_told(written: Write) -> None:
    rewards = written("def score(completion): return {'a': 1, 'b': float('nan'), 'c': None}[completion]")
    assert "gives nan for the answer 'b' to data.jsonl:2" in failure(rewards, "a", "b")
    assert "gives nothing (None) for the answer 'c' to data.jsonl:1" in failure(rewards, "c")


@pytest.mark.parametrize("form", ["completion", "completions"])
def test_a_function_that_raises_names_the_answer_and_the_line(form: str, written: Write) -> None:
    body = "1 / (completion != 'b')" if form == "completion" else "[1 / (c != 'b') for c in completions]"
    rewards = written(f"\ndef score({form}):\n    return {body}\n")
    said = failure(rewards, "a", "b", "c")
    assert "raises ZeroDivisionError: division by zero" in said and "functions_0.py:3 in score" in said
    assert "for the answer 'b' to data.jsonl:2" in said
    assert rewards.score([answer("a")]).tolist() == [[1]]  # it is still there


def test_a_function_that_fails_for_all_together_says_so(written: Write) -> None:
    rewards = written("def score(completions): return [1 / (3 - len(completions))] * len(completions)")
    assert "for 3 answers (the first to data.jsonl:1, the last to data.jsonl:3) together, and" in failure(
        rewards, *"abc"
    )


@pytest.mark.proves("reward_time_limit")
@pytest.mark.parametrize("form", ["completion", "completions"])
def test_a_function_that_hangs_names_the_answer(form: str, written: Write) -> None:
    hangs = "time.sleep(60 * ('b' in completion))" if form == "completion" else "time.sleep(60 * ('b' in completions))"
    value = "1" if form == "completion" else "[1] * len(completions)"
    rewards = written(f"import time\ndef score({form}):\n    {hangs}\n    return {value}", reward_time_limit=SHORT)
    begin = time.monotonic()
    said = failure(rewards, "a", "b", "c")
    assert "has not answered within 2.5 s for the answer 'b' to data.jsonl:2" in said and "reward_time_limit" in said
    assert time.monotonic() - begin < 60  # it would sleep as long
    assert rewards.score([answer("a")]).tolist() == [[1]]  # in a new process


def test_a_pattern_that_backtracks_for_ever_is_ended() -> None:
    rewards = opened(r"regex:^(a+)+$", reward_time_limit=SHORT)
    assert rewards.score([answer("aaa")]).tolist() == [[1]]
    assert "has not answered within 2.5 s for the answer" in failure(rewards, "a" * 60 + "b")
    rewards.close()


@pytest.mark.proves("reward_memory_limit")
@pytest.mark.parametrize("form", ["completion", "completions"])
def test_memory_is_limited(form: str, written: Write) -> None:
    source = f"""
        def score({form}):
            taken = bytearray((150 if "b" in {form} else 1) << 20)
            return 1 if "{form}" == "completion" else [1] * len(completions)
    """
    said = failure(written(source, reward_memory_limit=0.125), "a", "b")
    assert "needs more than 0.125 GiB of memory for the answer 'b' to data.jsonl:2" in said
    assert "reward_memory_limit" in said
    assert written(source, reward_memory_limit=0.5).score([answer("b")]).tolist() == [[1]]


@pytest.mark.parametrize(
    ("form", "ends", "told"),
    [
        ("completion", "sys.exit(3)", "calls sys.exit(3) ("),
        ("completion", "os._exit(3)", "has ended its process, with exit code 3"),
        ("completions", "os._exit(3)", "has ended its process, with exit code 3"),
        ("completion", "os.kill(os.getpid(), 11)", "has crashed: its process was ended by SIGSEGV"),
        ("completion", "os.kill(os.getpid(), 9)", "was ended by SIGKILL: the system may have run out of memory"),
        ("completions", "raise KeyboardInterrupt", "raises KeyboardInterrupt"),
        ("completion", "recurse()", "raises RecursionError: maximum recursion depth"),
        ("completion", "scribble(b'7')", "writes where its results go"),
        ("completion", "scribble(b'no JSON')", "writes where its results go"),
    ],
)
def test_a_function_that_ends_is_told_and_started_again(form: str, ends: str, told: str, written: Write) -> None:
    rewards = written(f"""
        import os, sys
        def recurse(): return recurse()
        def scribble(text):
            for number in range(3, 9):
                try:
                    os.write(number, text + b"\\n")
                except OSError:
                    pass
        def score({form}):
            if "b" in {form}:
                print("so long", flush=True)
                {ends}
            return 1 if "{form}" == "completion" else [1] * len(completions)
    """)
    said = failure(rewards, "a", "b", "c")
    assert told in said and "for the answer 'b' to data.jsonl:2" in said
    if "process" in told:
        assert "the last it printed: so long" in said
    assert rewards.score([answer("a")]).tolist() == [[1]]


def test_what_a_function_prints_is_shown_and_does_not_disturb(written: Write, caplog: pytest.LogCaptureFixture) -> None:
    rewards = written("""
        import os, sys
        def score(completion):
            print("hello\\x1b[2J", completion)
            print('{"result": 7}', file=sys.stderr)
            os.write(1, b"raw\\n" * 1000)
            assert sys.stdin.read() == ""
            return 1
    """)
    with caplog.at_level(logging.INFO):
        assert rewards.score([answer("a"), answer("b")]).tolist() == [[1], [1]]
        rewards.close()
        for _ in range(1500):  # what it printed comes through a thread
            if "more, which is not shown" in caplog.text:
                break
            time.sleep(0.02)
    assert "reward score prints: hello\\x1b[2J a" in caplog.text and "\x1b" not in caplog.text
    assert len([record for record in caplog.records if "reward score prints" in record.message]) == 21


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def other(completion): return 1", "has no function score .it has other."),
        ("score = 3", "score in .* is no function"),
        ("async def score(completion): return 1", "is a coroutine"),
        ("def score(text): return 1", "it takes text, and has to take either `completions`"),
        ("def score(completion, completions): return 1", "has to take either"),
        ("def score(completions, /): return 1", "cannot be given by name"),
        (
            "import nothing_of_this_name",
            "raises ModuleNotFoundError: No module named 'nothing_of_this_name' .*_0.py:1 in",
        ),
        ("def score(:", "raises SyntaxError"),
        ("raise SystemExit('no')", r"calls sys.exit\('no'\)"),
        ("while True: pass", "has not answered within 2.5 s"),
    ],
)
def test_a_function_that_cannot_be_opened_is_told(
    source: str, told: str, written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = SHORT if "while True" in source else 60.0  # an interpreter on a busy machine takes seconds to start
    monkeypatch.setattr(process, "START_SECONDS", limit)
    with pytest.raises(RewardError, match=f"reward score: it (?s:.)*{told}"):
        written(source, reward_time_limit=limit)


def test_a_function_that_cannot_be_opened_again_is_told(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    for form, ends in (("completion", "os._exit(3)"), ("completions", "os._exit(3)")):
        file.write_text(f"import os\ndef score({form}): {ends}\n")
        rewards = opened(f"python:{file}:score")
        file.write_text("raise RuntimeError('gone')")
        if form == "completion":  # the process ends here, and is opened again for the next call
            assert "for the answer 'a' to data.jsonl:1" in failure(rewards, "a", "b")
        said = failure(rewards, "a", "b")
        assert "raises RuntimeError: gone" in said and "where it is opened again" in said


def test_modules_and_files_that_are_missing_are_told(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="No module named 'no_such_module'"):
        opened("python:no_such_module.score")
    with pytest.raises(RewardError, match=r"cannot be opened: .*rewards\.py does not exist"):
        opened(f"python:{tmp_path}/rewards.py:score")


def test_a_schema_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)reward shape: it cannot be opened: .*missing\.json.*  Mend the schema"):
        opened(f"shape=json_schema:{tmp_path}/missing.json")


def test_arguments_that_no_record_has_are_told(written: Write) -> None:
    rewards = written("def score(completions, solutions): return [1]")
    said = failure(rewards, "a", solution="5")
    assert "takes `solutions`, which is no field of the record at data.jsonl:1" in said
    assert "completions, prompts, references, solution" in said


def test_fields_that_are_no_json_are_left_out_unless_asked_for(written: Write) -> None:
    columns = written("def score(completions, **columns): return [len(columns)] * len(completions)")
    assert columns.score([answer("a", sound=b"RIFF", level=1)]).tolist() == [[1]]
    assert "takes the field `sound`" in failure(written("def score(completion, sound): return 1"), "a", sound=b"RIFF")


@pytest.mark.proves("reference_field")
def test_functions_get_the_reference_of_the_field_that_is_named(written: Write) -> None:
    rewards = written("def score(completion, reference): return completion == reference", reference_field="truth")
    assert rewards.score([answer("5", truth="5", answer="6")]).tolist() == [[1]]
    assert "takes a reference answer, and at data.jsonl:1 the record has no field `truth`" in failure(rewards, "5")


def test_processes_end_with_the_rewards_and_with_this_program(tmp_path: Path) -> None:
    """What a reward has started ends, too, and also where the program is killed while the reward hangs in what lets no
    other thread run."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, re, subprocess, sys\n"
        "def score(completion):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    pathlib.Path({str(tmp_path / 'pids.new')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        f"    os.rename({str(tmp_path / 'pids.new')!r}, {str(tmp_path / 'pids')!r})\n"
        "    re.search('(a+)+$', 'a' * 60 + 'b')\n"
    )
    program = (
        "from tests.rewards.asking import answer, opened\n"
        f"opened('python:{tmp_path}/slow.py:score').score([answer('a')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    while not (tmp_path / "pids").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_file_of_this_folder_does_not_hide_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert opened("regex:a").score([answer("a")]).tolist() == [[1]]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=st.lists(st.tuples(st.text(max_size=40), st.floats(allow_nan=False, allow_infinity=False)), max_size=5))
def test_every_text_and_number_goes_through_the_process(found: list[tuple[str, float]], returning: Rewards) -> None:
    texts, values = [text for text, _ in found], [value for _, value in found]
    code = f"{values!r} if completions == {texts!r} else None"
    assert returning.score([answer(text, returned=code) for text in texts]).ravel().tolist() == values
