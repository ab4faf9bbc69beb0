"""Builds the native executor, where there is a compiler for it; everything else about the package is in pyproject.toml."""

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("kernels", "native")

# Contracted multiply-adds would round differently in differently inlined copies of a function: results must not depend on that.
COMMON = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
# gcc 12 warns of its own intrinsics, hundreds of times.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
_VNNI = [*_AVX512, "-mavx512vnni"]
_BF16 = [*_VNNI, "-mavx512bf16"]
DIGEST = runpy.run_path("kernels/native_abi.py")["sources_digest"](NATIVE)
OPTIONS = {
    "isa_avx2": _AVX2,
    "isa_avx512": _AVX512,
    "isa_avx512_vnni": _VNNI,
    "isa_avx512_bf16": _BF16,
    "isa_amx": [*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "abi": [f'-DFT_SOURCES="{DIGEST}"'],
}

SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class BuildNative(build_ext):
    """Compiles each instruction set with its own options, all of them at once, into one library."""

    user_options = [*build_ext.user_options, ("sanitize", None, "compile with AddressSanitizer and UndefinedBehaviorSanitizer")]
    boolean_options = [*build_ext.boolean_options, "sanitize"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.sanitize = False

    def build_extension(self, ext: Extension) -> None:
        checks = SANITIZE if self.sanitize else []

        def compile_one(source: str) -> list[str]:
            options = [*COMMON, *QUIET, *OPTIONS.get(Path(source).stem, []), *checks]
            return self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=options, depends=ext.depends)

        with ThreadPoolExecutor() as pool:
            objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
        Path(self.get_ext_fullpath(ext.name)).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread", *checks], target_lang="c++")


setup(
    ext_modules=[
        Extension(
            "foretoken.kernels._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.rglob("*.h")),
            language="c++",
            optional=True,  # without a compiler the package installs all the same and runs networks in torch
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
