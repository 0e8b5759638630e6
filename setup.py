"""Packaging: version ranges live here, tested pins in requirements.txt, tool settings in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "autoround_fp8" / "version.py").read_text(encoding="utf-8"))[1]
EVAL = ["lm_eval>=0.4.12,<0.5"]
NUMBA = ["numba>=0.61"]
DEMO = ["gguf>=0.17"]
TEST = ["pytest>=8", "pytest-xdist>=3.5", "psutil>=5.9", *EVAL, *DEMO, *NUMBA]
MAIN = "autoround_fp8.cli.main"

setup(
    name="autoround_fp8",
    version=VERSION,
    description="AutoRound-style calibration and export of static W8A8-FP8 checkpoints",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["autoround_fp8", "autoround_fp8.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.10",
        "transformers>=5.20,<6",
        "accelerate>=1.10",
        "datasets>=4.0",
        "safetensors>=0.6",
        "tqdm>=4.60",
        "packaging>=23",
    ],
    extras_require={
        "eval": EVAL,
        "numba": NUMBA,
        "triton": ["triton>=3.5; platform_system == 'Linux'"],
        "demo": DEMO,
        "test": TEST,
        "dev": [*TEST, "ruff>=0.12", "mypy>=1.15"],
    },
    entry_points={
        "console_scripts": [
            f"auto-round={MAIN}:main",
            f"auto_round={MAIN}:main",
            f"autoround-fp8={MAIN}:main",
            f"auto-round-best={MAIN}:main_best",
            f"auto-round-light={MAIN}:main_light",
            f"auto-round-rtn={MAIN}:main_rtn",
            f"auto-round-eval={MAIN}:main_eval",
            "autoround-fp8-lm-eval=autoround_fp8.evaluation.lm_eval_cli:main",
        ]
    },
)
