"""Imports go one way, and the package itself imports no framework."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hvd_gradcomp
from hvd_gradcomp import agreement, require
from hvd_gradcomp.errors import DisagreementError, MissingDependencyError, UsageError
from hvd_gradcomp.plan import Plan, differences
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.spec import TensorSpec

PACKAGE = Path(hvd_gradcomp.__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "tf_keras")

# Each layer may import from itself and from those below it.
LAYERS = [
    {"version", "errors"},
    {"kernels"},
    {"ops", "spec", "payload"},
    {"codecs", "schedule"},
    {"memory", "policy", "native"},
    {"coding"},
    {"exchange"},
    {"plan"},
    {"flow", "stats", "agreement", "state", "token", "unused", "require"},
    {"checkpoint", "collectives"},
    {"torch", "tensorflow", "mpi", "cli", "__main__", "__init__"},
    {"keras"},
]
# spec.parse makes codecs: the one way up, inside functions, so that importing stays one-way.
ALLOWED = {("spec", "codecs")}


def imports_of(file: Path) -> set[str]:
    """Names of the modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file: Path) -> None:
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    for name in imports_of(file):
        if not name.startswith("hvd_gradcomp."):
            continue
        other = name.split(".")[1]
        if other in modules and own != other and (own, other) not in ALLOWED:
            assert layer_of(other) <= layer_of(own), f"{file.name} imports {name}"


@pytest.mark.parametrize("file", [
    file for part in ("codecs", "memory", "exchange") for file in sorted((PACKAGE / part).glob("*.py"))
] + [PACKAGE / f"{name}.py" for name in (
    "coding", "native", "flow", "plan", "policy", "schedule", "payload", "spec", "stats", "state",
    "checkpoint")], ids=lambda file: file.name)
def test_algorithms_know_no_framework(file: Path) -> None:
    assert not {name.split(".")[0] for name in imports_of(file)} & set(FRAMEWORKS)


def test_importing_the_package_imports_no_framework() -> None:
    code = f"import sys, hvd_gradcomp; print([m for m in {FRAMEWORKS} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(("blocked", "adapter", "says"), [
    ("horovod", "torch", "docker/build-horovod.sh"), ("horovod", "tensorflow", "docker/build-horovod.sh"),
    ("horovod", "keras", "docker/build-horovod.sh"), ("keras", "keras", "hvd-gradcomp[tensorflow]"),
    ("torch", "torch", "hvd-gradcomp[torch]"), ("tensorflow", "tensorflow", "hvd-gradcomp[tensorflow]"),
    ("mpi4py", "mpi", "hvd-gradcomp[mpi]")])
def test_a_missing_dependency_is_said_with_its_remedy(blocked: str, adapter: str, says: str) -> None:
    code = (f"import sys; sys.modules[{blocked!r}] = None\nimport hvd_gradcomp\n"
            f"try:\n    import hvd_gradcomp.{adapter}\nexcept ImportError as error:\n    print(error)\n")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert says in out.stdout


@pytest.mark.parametrize(("version", "backend", "says"), [
    ("2.15.0", "tensorflow", r"horovod\.tensorflow\.keras\.DistributedOptimizer"),
    ("3.9.0", "jax", "KERAS_BACKEND=tensorflow")])
def test_another_keras_is_refused(version: str, backend: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(backend=lambda: backend)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__=version, config=config))
    with pytest.raises(MissingDependencyError, match=says):
        require.keras3()


def plan(names: str = "ab", codec: str = "sign", shape: tuple[int, ...] = (4,), **options) -> Plan:
    return Plan.make([TensorSpec(name, shape) for name in names], Policy.make(codec, 0), ranks=2, **options)


@pytest.mark.parametrize(("other", "says"), [
    (plan(codec="fp16"), "codec is 'fp16', not 'sign(block=1024)'"), (plan(seed=3), "seed is 3, not 0"),
    (plan(exchange="gather"), "exchange is 'gather', not 'auto'"),
    (plan(shape=(5,)), "shape of tensor 'a' is [5], not"),
    (plan("abc"), "tensor 'c' is there; it is missing"), (plan("a"), "tensor 'b' is missing; it is there"),
    (plan("ba"), "another order"), (plan(error_feedback=False), "error_feedback is False")])
def test_agreement_names_the_rank_and_the_difference(other: Plan, says: str) -> None:
    plans = [plan(), plan(), other]
    for mine in plans:
        digests = [each.digest() for each in plans]
        replies = iter([digests, [agreement.json.dumps(each.describe()).encode() for each in plans]])
        with pytest.raises(DisagreementError) as error:
            agreement.check(mine, lambda data, replies=replies: next(replies))
        assert "rank 2: " in str(error.value) and says in str(error.value) and "rank 1: " not in str(error.value)


def test_agreement_of_equal_plans_takes_one_exchange() -> None:
    calls: list[bytes] = []
    agreement.check(plan(), lambda data: calls.append(data) or [data, data])  # type: ignore[func-returns-value]
    assert calls == [plan().digest()]
    assert differences([plan().describe()] * 3) == []


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="'a'"):
        plan("aa")
