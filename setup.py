# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
The repository root is the package `atma`; flattened, the same files are the code of a Hub
repository.
"""

from pathlib import Path

from setuptools import setup

setup(
    name="atma",
    version="0.1.0",
    description="ATMA, a hybrid language model with polar attention and a memory, for Transformers",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    script_name="setup.py",  # so that setuptools leaves this file out of the package
    packages=["atma", "atma.kernels"],
    package_dir={"atma": ".", "atma.kernels": "kernels"},
    install_requires=["torch>=2.8", "transformers>=5.17", "safetensors"],
    extras_require={
        "train": [
            "accelerate>=1.1",
            "datasets",
            "evaluate",
            "matplotlib",
            "pyyaml",
            "rich",
            "tensorboard",
            "tokenizers",
        ],
        "peft": ["peft"],
        "test": [
            "accelerate>=1.1",
            "datasets",
            "matplotlib",
            # Triton's interpreter, which runs the kernels on the CPU, fails with NumPy 2.4.
            "numpy<2.4",
            "peft",
            "pytest",
            "pytest-xdist",
            "rich",
            "ruff",
            "triton==3.6.0; platform_system == 'Linux'",
        ],
        "notebooks": ["ipykernel", "nbclient", "nbformat"],
        # Other people's code that judges the model, in the versions that were tried.
        "ecosystem": [
            "bitsandbytes==0.50.2",
            "deepspeed==0.19.8",
            "einops",
            "fastapi",
            "fla-core==0.6.0",
            "lm_eval==0.4.13",
            "openai",
            "parameterized",
            "peft==0.21.2",
            "setuptools",
            "torchao==0.18.0",
            "trl==1.16.0",
            "uvicorn",
        ],
    },
)
