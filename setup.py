"""Compile the CPU kernels into the wheel where that is possible; all else is declared in pyproject.toml.

Without Linux on x86-64 or a C compiler the wheel has none and is one for any system: the first run compiles them, or
Paddle's operators compute. $ERNIEKIT_KERNELS decides otherwise: `require` fails without them, `none` leaves them out.
"""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = os.environ.get("ERNIEKIT_KERNELS", "auto")
LIBRARIES = Path("erniekit/native/lib")  # of native/library.py


def load_compiler():
    """Return the module that compiles, without its package, whose dependencies need not be there."""
    spec = importlib.util.spec_from_file_location("compiler", Path(__file__).parent / "erniekit/native/compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernels(folder: Path) -> None:
    """Compile the libraries of all paths into an empty folder, or none."""
    shutil.rmtree(folder, ignore_errors=True)
    if KERNELS == "none":
        return
    try:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise OSError(f"the kernels are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
        folder.mkdir(parents=True)
        compiler = load_compiler()
        for path in compiler.PATHS:
            compiler.compile_library(path, folder / compiler.file_name(path))
    except Exception as error:  # whatever it is, the wheel works without
        if KERNELS == "require":
            raise
        shutil.rmtree(folder, ignore_errors=True)
        print(f"warning: the wheel gets no CPU kernels: {error}", file=sys.stderr)


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # which runs from the sources, and compiles into the cache
            compile_kernels(Path(self.build_lib) / LIBRARIES)


class WheelOfOneSystem(bdist_wheel):
    """With kernels, a wheel for every Python 3 of one system; without, for any system."""

    def run(self):
        self.run_command("build")
        if (Path(self.get_finalized_command("build_py").build_lib) / LIBRARIES).is_dir():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # so that it installs where platforms differ
        super().run()

    def get_tag(self):
        return super().get_tag() if self.root_is_pure else ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfOneSystem})
