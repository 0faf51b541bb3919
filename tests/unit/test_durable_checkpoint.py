"""A folder is a checkpoint once it is whole: ``auto`` skips one that is not, a name of one is refused."""

import json
from pathlib import Path

import pytest

from psrl.errors import ConfigError, InputError
from psrl.integrations.verl.trainer.durable_checkpoint import (
    MANIFEST,
    TRACKER,
    Found,
    begin,
    check_settings,
    find_latest,
    prune,
    publish,
    read_manifest,
    resume_folder,
    seal,
    step_folder,
)


def write(root: Path, step: int) -> Path:
    """Files as veRL leaves them, without a manifest."""
    folder = step_folder(root, step)
    shards = folder / "actor" / "optimizer" / "dist_ckpt"
    shards.mkdir(parents=True)
    (shards / "__0_0.distcp").write_bytes(b"x" * 1000)
    (folder / "actor" / "ckpt_contents.json").write_text("{}")
    (folder / "data.pt").write_bytes(b"y" * 10)
    return folder


def save(root: Path, step: int) -> Path:
    folder = write(root, step)
    seal(folder, step)
    publish(root, step)
    return folder


def why_not(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_a_whole_checkpoint(tmp_path):
    folder = save(tmp_path, 3)
    assert find_latest(tmp_path) == Found(folder, ())
    assert (tmp_path / TRACKER).read_text() == "3"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["global_step"] == 3
    assert manifest["files"] == {
        "actor/ckpt_contents.json": 2,
        "actor/optimizer/dist_ckpt/__0_0.distcp": 1000,
        "data.pt": 10,
    }
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_3", TRACKER}


def test_what_the_trainer_keeps_comes_back(tmp_path):
    seal(write(tmp_path, 1), 1, {"kl_coef": 0.25})
    assert read_manifest(step_folder(tmp_path, 1))["trainer_state"] == {"kl_coef": 0.25}


def test_nothing_saved(tmp_path):
    assert find_latest(tmp_path).folder is None
    assert find_latest(tmp_path / "absent").folder is None
    with pytest.raises(InputError, match="nothing was saved"):
        seal(tmp_path / "global_step_1", 1)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda folder: (folder / MANIFEST).unlink(),
            f"not saved to its end, or not by psrl's trainer (no {MANIFEST}",
        ),
        (lambda folder: (folder / "data.pt").write_bytes(b"y" * 4), "data.pt has 4 bytes, but 10 were saved"),
        (lambda folder: (folder / "data.pt").unlink(), "data.pt is missing"),
        (lambda folder: (folder / MANIFEST).write_text('{"format_'), "not a manifest of a checkpoint"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "not a manifest of a checkpoint"),
    ],
)
def test_a_half_written_one_is_skipped_by_auto_and_refused_by_name(tmp_path, damage, reason):
    good = save(tmp_path, 2)
    damage(save(tmp_path, 4))
    found = find_latest(tmp_path)
    assert found.folder == good
    assert len(found.skipped) == 1 and reason in found.skipped[0]
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path: ") as caught:
        resume_folder("resume_path", tmp_path, str(tmp_path / "global_step_4"))
    assert reason in str(caught.value)
    assert resume_folder("resume_path", tmp_path, str(good)).folder == good


def test_killed_between_the_data_and_the_tracker(tmp_path):
    good = save(tmp_path, 2)
    write(tmp_path, 4)  # the tracker still names 2
    found = find_latest(tmp_path)
    assert found.folder == good
    assert len(found.skipped) == 1 and "global_step_4: not saved to its end" in found.skipped[0]
    (tmp_path / TRACKER).write_text("")  # veRL truncates it before it writes
    found = find_latest(tmp_path)
    assert found.folder == good
    assert f"{tmp_path / TRACKER}: not the number of a step: ''" in found.skipped
    assert any("global_step_4: not saved to its end" in reason for reason in found.skipped)


def test_only_half_written_ones(tmp_path):
    write(tmp_path, 1)
    publish(tmp_path, 1)
    found = find_latest(tmp_path)
    assert found.folder is None and "global_step_1: not saved to its end" in found.skipped[0]


def test_the_tracker_decides_and_otherwise_the_last_one_saved(tmp_path):
    steps = {step: save(tmp_path, step) for step in (2, 4, 6)}
    publish(tmp_path, 4)  # as a user who goes back does
    assert find_latest(tmp_path).folder == steps[4]
    begin(steps[2])
    steps[2] = save(tmp_path, 2)  # went back to the start and saved 2 again: 4 and 6 are of another run
    (tmp_path / TRACKER).unlink()
    assert find_latest(tmp_path).folder == steps[2]


def test_the_tracker_names_what_is_not_there(tmp_path):
    good = save(tmp_path, 2)
    publish(tmp_path, 7)
    found = find_latest(tmp_path)
    assert found.folder == good
    assert found.skipped == (f"{tmp_path}/global_step_7: no such folder, but {TRACKER} names it",)


def test_a_renamed_one_is_not_what_it_says(tmp_path):
    save(tmp_path, 2).rename(tmp_path / "global_step_9")
    assert "is of step 2" in why_not(tmp_path / "global_step_9")


def test_older_ones_go_only_after_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    left_over = write(tmp_path, 5)
    assert [folder.name for folder in prune(tmp_path, newest=4, keep=2)] == ["global_step_1", "global_step_2"]
    assert prune(tmp_path, newest=4, keep=2) == []
    assert left_over.is_dir()
    assert [folder.name for folder in prune(tmp_path, newest=4, keep=1)] == ["global_step_3"]
    assert find_latest(tmp_path).folder == step_folder(tmp_path, 4)


def test_what_an_interrupted_save_left_goes_before_the_next(tmp_path):
    folder = write(tmp_path, 2)
    (folder / "actor" / "stale_shard").write_bytes(b"z")
    begin(folder)
    assert not folder.exists()
    save(tmp_path, 2)
    assert "actor/stale_shard" not in read_manifest(folder)["files"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.resume_mode": "sometimes"}, "trainer.resume_mode must be auto, disable or resume_path"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path must name a folder global_step_N, got None"),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/nowhere/global_step_3"},
            "trainer.resume_from_path: /nowhere/global_step_3: no such folder",
        ),
        ({"actor_rollout_ref.actor.checkpoint.async_save": True}, "actor_rollout_ref.actor.checkpoint.async_save=true"),
        ({"critic.checkpoint.async_save": True}, "critic.checkpoint.async_save=true"),
    ],
)
def test_settings_that_cannot_work(tmp_path, settings, message):
    job = {"trainer.resume_mode": "auto", "trainer.default_local_dir": str(tmp_path)}
    check_settings(job.get)
    with pytest.raises(ConfigError) as caught:
        check_settings({**job, **settings}.get)
    assert message in str(caught.value)
