"""The one thing that setup.cfg cannot say: kernels in C, without which the codecs work as well."""

from setuptools import Extension, setup

KERNELS = Extension(
    "fastcheck_codecs._kernels",
    ["codecs/kernels.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    # Where there is no compiler the installation goes on, and numpy does the work.
    optional=True,
)

setup(ext_modules=[KERNELS], options={"bdist_wheel": {"py_limited_api": "cp311"}})
