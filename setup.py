"""Build and metadata of hvd-gradcomp. Settings of the tools are in pyproject.toml."""

import os
import platform
import re
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The version in hvd_gradcomp/version.py, read as text: the package's own imports are not installed yet."""
    text = (HERE / "hvd_gradcomp" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("no line '__version__ = \"...\"' in hvd_gradcomp/version.py")
    return found[1]


# Frameworks are extras: the package imports without any. Their CPU builds have other names or sources
# (tensorflow-cpu, torch's CPU index): who wants those installs them first and leaves the extra out.
EXTRAS = {
    "torch": ["torch>=2.1"],
    "tensorflow": ["tensorflow>=2.16", "keras>=3"],
    "mpi": ["mpi4py>=4"],
    "plot": ["matplotlib>=3.8"],
    "dev": ["hypothesis", "mypy", "psutil", "pytest>=8", "pytest-timeout", "ruff", "tqdm"],
}

# The kernels are built once for each kind of processor, and the loader takes the fastest that runs. No
# contraction to fused multiply-adds: they round differently, and the bytes must be the same everywhere.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden",
         "-Wno-psabi", "-pthread"]
# After Python's own flags, which ask for debug information, ten times the code. (CFLAGS does not reach C++ everywhere.)
FLAGS += os.environ.get("HVD_GRADCOMP_CXXFLAGS", "-g0").split()
PROCESSORS: dict[str, list[str]] = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    PROCESSORS |= {"avx2": ["-march=haswell"], "avx512": ["-march=skylake-avx512", "-mprefer-vector-width=512"]}

# Which of them, by name; the sanitizers' run needs but one.
if "HVD_GRADCOMP_BUILDS" in os.environ:
    PROCESSORS = {name: PROCESSORS[name] for name in os.environ["HVD_GRADCOMP_BUILDS"].split(",")}


def kernels(processor: str, flags: list[str]) -> Extension:
    """One build; optional, since everything works without it, only slower."""
    source = Path("hvd_gradcomp") / "kernels" / "src"
    return Extension(
        f"hvd_gradcomp.kernels.{processor}", [str(source / "module.cpp")], include_dirs=[pybind11.get_include()],
        depends=sorted(map(str, source.glob("*.h"))), define_macros=[("HVD_GRADCOMP_MODULE", processor)],
        extra_compile_args=FLAGS + flags, extra_link_args=FLAGS, language="c++", optional=True)


setup(
    name="hvd-gradcomp",
    version=version(),
    description="Gradient compression for an unmodified Horovod: PyTorch, TensorFlow and mpi4py",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    ext_modules=[kernels(processor, flags) for processor, flags in PROCESSORS.items()],
    options={"build_ext": {"parallel": os.cpu_count()}},
    packages=find_packages(include=["hvd_gradcomp", "hvd_gradcomp.*"]),
    package_data={"hvd_gradcomp": ["py.typed"], "hvd_gradcomp.kernels": ["src/*"]},
    install_requires=["numpy>=1.26", "pyyaml>=6", "rich>=13"],
    extras_require=EXTRAS,
    keywords=["horovod", "gradient compression", "distributed training", "pytorch", "tensorflow"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
