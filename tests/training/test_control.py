"""What a run is told while it trains, and what it then does."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from erniekit.training.checkpoint.atomic_folder import checkpoint_name
from erniekit.training.checkpoint.resume import Start, open_output_folder
from erniekit.training.checkpoint.state import load_state
from erniekit.training.control import (
    CONTROL_FILE,
    NUMBERS,
    WORDS,
    Command,
    Commands,
    forward_commands,
    parse,
)
from erniekit.training.optim.schedules import learning_rate
from tests.training.fakes import FakePlan, Recorder, ReplayedRanks, fake_trainer
from tests.training.test_trainer import steps_of

FRESH = Start(None)
EVALUATION = FakePlan(4, batch_size=1, accumulation=1)


class ScriptedCommands:
    """Commands that come before certain steps."""

    def __init__(self, **lines: list[str]) -> None:
        self._by_call = {int(name[1:]): list(of) for name, of in lines.items()}
        self._calls = -1

    def lines(self) -> list[str]:
        self._calls += 1
        return self._by_call.get(self._calls, [])


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("save", Command("save")),
        ("  Quit \r", Command("quit")),
        ("eval", Command("eval")),
        ("STATUS", Command("status")),
        ("lr 1e-4", Command("lr", 1e-4)),
        ("lr  0", Command("lr", 0.0)),
        ("lr schedule", Command("lr")),
        ("export", Command("export")),
        ("time", Command("time")),
        ("time to 3000", Command("time", 3000)),
        ("loss_scale 1024", Command("loss_scale", 1024.0)),
        ("events", Command("events")),
        ("Events  Clear", Command("events clear")),
        ("save@30", Command("save", step=30)),
        ("lr 1e-4 @ 30", Command("lr", 1e-4, 30)),
        ("lr schedule@30", Command("lr", None, 30)),
    ],
)
def test_lines_that_are_commands(line: str, command: Command) -> None:
    assert parse(line) == command


@pytest.mark.parametrize("line", ["stop", "save now", "lr", "lr 1 2", "savequit", "loss_scale", "event", "go@30", "@3"])
def test_lines_that_are_none_are_told_what_there_is(line: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"is not a command; the commands are save, quit, eval, export, status, time, lr X, loss_scale X, events, "
        r"events clear and COMMAND@STEP$",
    ):
        parse(line)


@pytest.mark.parametrize("value", ["x", "-1", "inf", "nan"])
def test_a_learning_rate_is_a_number(value: str) -> None:
    with pytest.raises(ValueError, match=f"lr {value}: write a learning rate"):
        parse(f"lr {value}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("loss_scale schedule", "loss_scale schedule: write a number, such as `loss_scale 1024`"),
        ("save@soon", "save@soon: write the step as a number, such as `save@3000`"),
        ("lr 0.5@-1", "lr 0.5@-1: write the step as a number, such as `lr 0.5@3000`"),
        ("time to go", "time to go: write the step as a number, such as `time to 3000`"),
        ("events@3", "events@3: `events` is answered at once, so it takes no step"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(line: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(line)
    assert str(caught.value) == told


@pytest.mark.parametrize("line", ["save@30", "lr 0.0001@7", "lr schedule@7", "loss_scale 16777216@2", "time to 3000@9"])
def test_a_command_is_shown_as_it_is_written(line: str) -> None:
    assert str(parse(line)) == line


def test_the_file_is_read_once_and_removed(tmp_path: Path) -> None:
    commands, file = Commands(tmp_path), tmp_path / CONTROL_FILE
    assert commands.lines() == []
    file.touch()
    assert commands.lines() == [] and file.exists()  # somebody is about to write
    file.write_text("save\n\nlr 1e-4\n")
    assert commands.lines() == ["save", "lr 1e-4"]
    assert commands.lines() == [] and not list(tmp_path.iterdir())


def test_a_writer_that_still_has_the_file_open_is_heard(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    with (tmp_path / CONTROL_FILE).open("w") as slow:
        slow.write("save\nlr 1")
        slow.flush()
        assert commands.lines() == ["save"] and not list(tmp_path.iterdir())
        slow.write("e-4\nstatus\n")
        slow.flush()
        (tmp_path / CONTROL_FILE).write_text("quit\n")
        assert commands.lines() == ["lr 1e-4", "status", "quit"]
        assert commands.lines() == []


def test_somebody_may_type_into_the_file(tmp_path: Path) -> None:
    """As `cat > control` does: one open file, a line now and then."""
    commands = Commands(tmp_path)
    with (tmp_path / CONTROL_FILE).open("w", buffering=1) as typist:
        for line in ("save", "status", "lr 1e-4"):
            typist.write(f"{line}\n")
            assert [each for each in commands.lines() if each] == [line]
            assert commands.lines() == [] and not list(tmp_path.iterdir())


def test_a_writer_that_begins_anew_while_the_file_is_taken_is_heard(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    (tmp_path / CONTROL_FILE).write_text("status\nstatus\n")
    with (tmp_path / CONTROL_FILE).open("r+") as shell:
        assert commands.lines() == ["status", "status"]
        shell.truncate(0)
        shell.write("quit\n")
        shell.flush()
        assert commands.lines() == ["quit"]


def test_a_line_without_an_end_is_obeyed_at_the_next_look(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    (tmp_path / CONTROL_FILE).write_text("save\nquit")
    assert commands.lines() == ["save"]
    assert commands.lines() == ["quit"]
    assert commands.lines() == []


def test_a_huge_file_is_read_in_part_and_that_is_told(tmp_path: Path) -> None:
    (tmp_path / CONTROL_FILE).write_bytes(b"save\n" + b"status\n" * 10**6)
    with (tmp_path / CONTROL_FILE).open("ab") as file:
        file.truncate(10**9)  # a hole
    commands = Commands(tmp_path)
    lines = commands.lines()
    assert lines[0] == "save" and set(lines[1:-1]) == {"status"} and len(lines) < 700
    assert lines[-1] == "(and 999,995,904 bytes that were not read)"
    assert commands.lines() == []


def test_bytes_that_are_no_text_and_long_lines_are_answered_briefly(tmp_path: Path) -> None:
    (tmp_path / CONTROL_FILE).write_bytes(b"\xef\xbb\xbfsave\r\n\xff\xfe\x00\n" + b"x" * 1000 + b"\n")
    first, second, third = Commands(tmp_path).lines()
    assert parse(first) == Command("save")  # Windows writes a mark before it
    for line in (second, third, "lr " + "9" * 1000):
        with pytest.raises(ValueError) as caught:
            parse(line)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing", "closed to us"])
def test_what_cannot_be_read_ends_no_run(tmp_path: Path, kind: str) -> None:
    file = tmp_path / CONTROL_FILE
    if kind == "folder":
        (file / "inner").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "link to nothing":
        file.symlink_to(tmp_path / "nothing")
    else:
        file.write_text("quit\n")
        file.chmod(0)
    lines = Commands(tmp_path).lines()
    assert lines == ([] if kind != "closed to us" or os.geteuid() else ["quit"])


def test_a_terminal_that_hung_up_is_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"save\n")
    calls = []

    def hung_up(descriptor: int, size: int) -> bytes:
        calls.append(descriptor)
        raise OSError(5, "Input/output error")

    commands = Commands(None, reading)
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", hung_up)
        assert commands.lines() == [] and commands.lines() == []
    assert calls == [reading]
    os.close(reading)
    os.close(writing)


def test_what_was_written_before_a_run_is_not_for_it(tmp_path: Path) -> None:
    (tmp_path / CONTROL_FILE).write_text("quit\nquit")
    assert Commands.for_run(tmp_path).lines() == []
    assert not (tmp_path / CONTROL_FILE).exists()


def test_whole_lines_are_read_from_the_terminal() -> None:
    typed, terminal = pty.openpty()
    try:
        commands = Commands(None, terminal)
        assert commands.lines() == []
        os.write(typed, b"sa")
        assert commands.lines() == []
        os.write(typed, b"ve\nstatus\n")
        assert commands.lines() == ["save", "status"]
    finally:
        os.close(typed)
        os.close(terminal)


def test_a_closed_pipe_is_read_no_more() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"save\nqu")
    os.close(writing)
    commands = Commands(None, reading)
    assert commands.lines() == ["save"]
    os.close(reading)
    assert commands.lines() == []


def test_save_and_quit(tmp_path: Path, logged: list[str]) -> None:
    commands = ScriptedCommands(s2=["save"], s4=["save", "quit"])
    result = fake_trainer(tmp_path, commands=commands).fit(FRESH)
    assert (result.step, result.exit_code, result.stopped_by) == (4, 0, None)
    assert steps_of(tmp_path) == [2, 4]
    assert logged == [
        "save: saved checkpoint-2",
        "save: saved checkpoint-4",
        "stopped after step 4; continue with resume_from_checkpoint=true",
    ]
    whole = fake_trainer(tmp_path / "whole")
    whole.fit(FRESH)
    with open_output_folder(tmp_path, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        resumed = fake_trainer(tmp_path)
        resumed.model.load(start.checkpoint)
        assert resumed.fit(start).step == 9
    for name, value in whole.model.arrays().items():
        np.testing.assert_array_equal(resumed.model.arrays()[name], value, err_msg=name)


def test_the_learning_rate_stays_until_the_schedule_has_it_again(tmp_path: Path, logged: list[str]) -> None:
    recorder = Recorder()
    commands = ScriptedCommands(s3=["lr 0.002"], s5=["quit"])
    trainer = fake_trainer(tmp_path, commands=commands, callbacks=[recorder])
    trainer.fit(FRESH)
    assert "lr: step 4 has a learning rate of 0.002, until `lr schedule`" in logged
    with open_output_folder(tmp_path, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        resumed = fake_trainer(tmp_path, commands=ScriptedCommands(s2=["lr schedule"]), callbacks=[recorder])
        resumed.model.load(start.checkpoint)
        resumed.fit(start)
    rates = [record["learning_rate"] for record in recorder.steps]
    planned = [learning_rate(step, trainer.config.training, trainer.total_steps) for step in range(9)]
    assert rates == [*planned[:3], *[0.002] * 4, *planned[7:]]


def test_a_learning_rate_that_came_after_the_checkpoint_is_told(tmp_path: Path, logged: list[str]) -> None:
    fake_trainer(tmp_path, commands=ScriptedCommands(s3=["save", "lr 2e-3", "quit"])).fit(FRESH)
    assert "checkpoint-3 was saved before `lr`: give the command again to the run that resumes from it" in logged
    logged.clear()
    fake_trainer(tmp_path / "b", commands=ScriptedCommands(s3=["lr 2e-3", "save", "quit"])).fit(FRESH)
    assert not any("saved before" in line for line in logged)
    fake_trainer(tmp_path / "c", commands=ScriptedCommands(s3=["save", "lr 2e-3", "save", "quit"])).fit(FRESH)
    assert load_state(tmp_path / "c" / "checkpoint-3").learning_rate is None  # the first one stayed
    assert sum("checkpoint-3 was saved before `lr`" in line for line in logged) == 1


def weights_after(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_commands_for_later_steps_happen_there(tmp_path: Path, logged: list[str]) -> None:
    recorder = Recorder()
    commands = ScriptedCommands(s1=["save@4", "export@6", "lr 0.002@5", "events"], s7=["events"])
    trainer = fake_trainer(tmp_path, commands=commands, callbacks=[recorder])
    trainer.fit(FRESH)
    assert logged[:4] == [
        "save@4: noted",
        "export@6: noted",
        "lr 0.002@5: noted",
        "events: save@4, lr 0.002@5, export@6",
    ]
    assert "events: none" in logged and steps_of(tmp_path) == [4]
    planned = [learning_rate(step, trainer.config.training, trainer.total_steps) for step in range(9)]
    assert [record["learning_rate"] for record in recorder.steps] == [*planned[:5], *[0.002] * 4]
    fake_trainer(tmp_path / "b", commands=ScriptedCommands(s5=["lr 0.002"], s6=["quit"])).fit(FRESH)
    expected = weights_after(tmp_path / "b" / checkpoint_name(6))
    for name, value in weights_after(tmp_path / "export-6").items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert f"export: {tmp_path / 'export-6'} holds the model after step 6" in logged
    assert (tmp_path / "export-6" / "training_config.yaml").read_bytes() == (
        tmp_path / "training_config.yaml"
    ).read_bytes()


def test_a_resumed_run_does_what_was_wanted_of_it(tmp_path: Path, logged: list[str]) -> None:
    wanted = ["lr 0.002@5", "save@7", "quit@3"]
    whole = fake_trainer(tmp_path / "whole", commands=ScriptedCommands(s1=wanted[:2]))
    whole.fit(FRESH)
    for saves in ({}, {"save_strategy": "steps", "save_steps": 3}):  # `quit@3` is not in a checkpoint of step 3
        folder = tmp_path / f"stopped{len(saves)}"
        assert fake_trainer(folder, commands=ScriptedCommands(s1=wanted), **saves).fit(FRESH).step == 3
        with open_output_folder(folder, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
            resumed = fake_trainer(folder)
            resumed.model.load(start.checkpoint)
            logged.clear()
            assert resumed.fit(start).step == 9
        assert "events: lr 0.002@5, save@7; `events clear` forgets them" in logged
        assert checkpoint_name(7) in {path.name for path in folder.iterdir()}
        for name, value in whole.model.arrays().items():
            np.testing.assert_array_equal(resumed.model.arrays()[name], value, err_msg=name)


def test_a_checkpoint_has_what_the_commands_of_its_step_have_changed(tmp_path: Path) -> None:
    fake_trainer(tmp_path, commands=ScriptedCommands(s1=["save@4", "lr 0.002@4", "lr schedule@6"])).fit(FRESH)
    state = load_state(tmp_path / checkpoint_name(4))
    assert state.learning_rate == 0.002 and state.events == [Command("lr", None, 6)]


def test_commands_for_later_are_forgotten_or_refused(tmp_path: Path, logged: list[str]) -> None:
    commands = ScriptedCommands(s2=["save@2", "save@10", "save@9", "export@4", "events clear", "events"])
    fake_trainer(tmp_path, commands=commands).fit(FRESH)
    assert logged[:6] == [
        "save@2: write a step from 3 to 9",
        "save@10: write a step from 3 to 9",
        "save@9: noted",
        "export@4: noted",
        "events: export@4, save@9: forgotten",
        "events: none",
    ]
    assert steps_of(tmp_path) == [] and not (tmp_path / "export-4").exists()


def test_an_event_that_came_after_the_checkpoint_is_told(tmp_path: Path, logged: list[str]) -> None:
    fake_trainer(tmp_path, commands=ScriptedCommands(s3=["save", "save@7", "quit"])).fit(FRESH)
    told = "checkpoint-3 was saved before `COMMAND@STEP`: give the command again to the run that resumes from it"
    assert told in logged


def test_the_loss_scale_is_set_within_its_bounds(tmp_path: Path, logged: list[str]) -> None:
    commands = ScriptedCommands(s2=["loss_scale 64", "loss_scale 8", "loss_scale 32@5"])
    trainer = fake_trainer(tmp_path, commands=commands, initial_loss_scale=1024.0, loss_scale_bounds=(16.0, 4096.0))
    trainer.fit(FRESH)
    assert logged[:3] == [
        "loss_scale: step 3 has a loss scale of 64",
        "loss_scale 8: expected a number from 16 (min_loss_scale) to 4,096 (max_loss_scale)",
        "loss_scale 32@5: noted",
    ]
    assert trainer.state.loss_scale is not None
    assert (trainer.state.loss_scale.scale, trainer.state.loss_scale.finite_steps) == (32.0, 4)
    logged.clear()
    fake_trainer(tmp_path / "float32", commands=ScriptedCommands(s2=["loss_scale 64"])).fit(FRESH)
    assert logged[0] == "loss_scale 64: this run has no loss scale; it needs fp16: true and a GPU"


def test_evaluation_and_status_change_nothing(tmp_path: Path, logged: list[str]) -> None:
    recorder = Recorder()
    commands = ScriptedCommands(s1=["status"], s5=["eval", "status", "what"])
    trainer = fake_trainer(tmp_path / "told", commands=commands, callbacks=[recorder], evaluation_plan=EVALUATION)
    trainer.fit(FRESH)
    assert [record["step"] for record in recorder.evaluations] == [5]
    assert logged[0].startswith("status: 1 of 9 steps, epoch 0.33, mean loss ")
    assert logged[0].endswith("tokens/s; nothing is saved")
    assert logged[1].startswith("status: 5 of 9 steps") and "learning rate 0.0" in logged[1]
    assert logged[2].startswith("'what' is not a command")
    plain = fake_trainer(tmp_path / "plain")
    plain.fit(FRESH)
    for name, value in plain.model.arrays().items():
        np.testing.assert_array_equal(trainer.model.arrays()[name], value, err_msg=name)


def test_evaluation_without_data_is_answered(tmp_path: Path, logged: list[str]) -> None:
    fake_trainer(tmp_path, commands=ScriptedCommands(s1=["eval"])).fit(FRESH)
    assert (
        logged[0] == "eval: this run has no held-out data; it needs do_eval: true and eval_dataset_path or eval_split"
    )


class Follower(ReplayedRanks):
    """The second of two ranks: it has no terminal, and hears what the first one has read."""

    is_main_process = False


def test_other_ranks_obey_what_the_first_has_read(tmp_path: Path) -> None:
    from erniekit.training.control import StopRequest

    trainer = fake_trainer(tmp_path, commands=ScriptedCommands(s0=["quit"]))
    trainer.ranks = Follower([[0, ["lr 0.5"]], [0, ["quit"]]], [[0, []], [0, []]])
    assert not trainer._should_stop(StopRequest())
    assert trainer.state.learning_rate == 0.5
    assert trainer._should_stop(StopRequest())


def test_lines_are_handed_on_to_the_ranks_of_a_job(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    assert forward_commands([], tmp_path / "not there") == ""
    assert forward_commands(["save"], tmp_path / "not there") == "save: the run has not begun; type it again later"
    assert not list(tmp_path.iterdir())
    assert forward_commands(["save"], tmp_path) == "" and forward_commands(["lr 1e-4", "quit"], tmp_path) == ""
    assert commands.lines() == ["save", "lr 1e-4", "quit"]


def test_a_file_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / CONTROL_FILE).mkdir()
    assert forward_commands(["save", "quit"], tmp_path).startswith(
        f"save, quit: {tmp_path / CONTROL_FILE} cannot be written ("
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.just("look"),
            st.just("open anew"),
            st.tuples(st.sampled_from(["save", "status", "lr 1e-4"]), st.integers(0, 8)),
        ),
        max_size=30,
    )
)
def test_every_line_is_heard_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, events: list[str | tuple[str, int]]
) -> None:
    """Whoever writes: with one open file or several, in pieces or not, before a look at the file and after it."""
    folder = tmp_path_factory.mktemp("control")
    commands, written, heard = Commands(folder), list[str](), list[str]()
    writer = (folder / CONTROL_FILE).open("ab", buffering=0)
    for event in events:
        if event == "look":
            heard += commands.lines()
        elif event == "open anew":
            writer.close()
            writer = (folder / CONTROL_FILE).open("ab", buffering=0)
        else:
            line, cut = event
            written.append(line)
            whole = f"{line}\n".encode()
            writer.write(whole[:cut])
            heard += commands.lines()  # in the middle of a line, perhaps
            writer.write(whole[cut:])
    heard += commands.lines() + commands.lines()
    writer.close()
    assert heard == written
    assert all(isinstance(parse(line), Command) for line in heard)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), max_size=4))
def test_no_bytes_end_a_run(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("control")
    commands = Commands(folder)
    for piece in pieces:
        with (folder / CONTROL_FILE).open("ab") as file:
            file.write(piece)
        for line in commands.lines():
            try:
                assert parse(line).name in (*WORDS, *NUMBERS)
            except ValueError as error:
                assert re.search("is not a command|write a learning rate|write a number|write the step", str(error))
