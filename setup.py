"""Build the kernels in csrc/ beside mtp.py.

    python setup.py build_ext --inplace           here, for use from this folder
    pip install --no-build-isolation .            with the PyTorch that is installed

CUDA kernels are built when the installed PyTorch has CUDA and a toolkit is found (MTP_CUDA=1 insists,
MTP_CUDA=0 leaves them out) for TORCH_CUDA_ARCH_LIST, by default "8.0;9.0;10.0+PTX". Without a working
compiler `pip install` still installs pure Python and says so; `build_ext` fails.
"""
import glob
import os
import sys
from setuptools import setup

CPP = ["csrc/bind.cpp", "csrc/merge_cpu.cpp", "csrc/experts_cpu.cpp", "csrc/loss_cpu.cpp"]
CUDA = ["csrc/merge.cu", "csrc/experts.cu", "csrc/experts_cuda.cpp", "csrc/loss.cu"]
HEADERS = glob.glob("csrc/*.*h")
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []
CXX_FLAGS = ["-O2", "-g0", "-funswitch-loops", "-Wno-psabi", "-Wno-unknown-pragmas", *OPENMP]

def warn(reason):
    line = "!" * 100
    text = f"mtp: installing WITHOUT compiled kernels, mtp.py will use PyTorch only: {reason}"
    print(line, text, line, sep="\n", file=sys.stderr, flush=True)

def extension(cpp_extension, torch):
    wanted = os.environ.get("MTP_CUDA")
    found = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    if wanted == "1" and not found:
        raise RuntimeError(
            f"MTP_CUDA=1, but PyTorch {torch.__version__} was built for CUDA {torch.version.cuda} and "
            f"CUDA_HOME is {cpp_extension.CUDA_HOME}; install a CUDA PyTorch and set CUDA_HOME")
    if wanted == "0" or not found:
        flags = {"cxx": CXX_FLAGS}
        return cpp_extension.CppExtension("mtp_kernels", CPP, depends=HEADERS, extra_compile_args=flags)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
    flags = {"cxx": [*CXX_FLAGS, "-DMTP_CUDA"], "nvcc": ["-O3", "--threads=2"]}
    return cpp_extension.CUDAExtension("mtp_kernels", CPP + CUDA, depends=HEADERS, extra_compile_args=flags)

def build_options():
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        warn(f"PyTorch is not importable while building ({error}); install it and pass --no-build-isolation")
        return {}
    class Build(cpp_extension.BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:
                if "build_ext" in sys.argv or os.environ.get("MTP_CUDA") == "1":
                    raise
                warn(error)
                self.extensions = []
    return {"ext_modules": [extension(cpp_extension, torch)], "cmdclass": {"build_ext": Build}}

setup(name="mtp", version="0.1.0", description="Train multi-token-prediction drafters",
      python_requires=">=3.10", py_modules=["mtp", "convert"], install_requires=["torch>=2.11,<2.15"],
      extras_require={"data": ["transformers", "safetensors", "tokenizers"]}, **build_options())
