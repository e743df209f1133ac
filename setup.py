"""Packaging. The tested versions are in requirements.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
PACKAGE = (HERE / "ring_attention_pytorch" / "__init__.py").read_text(encoding="utf-8")


def away_from_home(text: str) -> str:
    """Name files where Markdown links to them: a package index has the text alone."""
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\((?!https?:|#)\1\)", r"`\1`", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", r"\1 (`\2`)", text)


setup(
    name="ring-attention-pytorch",
    version=re.search(r'^__version__ = "(.+)"$', PACKAGE, re.MULTILINE)[1],
    description="Exact attention over a sequence that is spread over many processes",
    long_description=away_from_home(README),
    long_description_content_type="text/markdown",
    author="The ring_attention_pytorch authors",
    license_expression="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["ring_attention_pytorch*"]),
    package_data={"ring_attention_pytorch": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.11", "einops>=0.8", "beartype>=0.22.2"],
    extras_require={
        "triton": ["triton>=3.4"],
        "flash": ["flash-attn>=2.8"],  # can't be built in isolation: README, "Install"
        "flash4": ["flash-attn-4>=4.0.0b36"],
        "transformers": ["transformers>=5.17", "accelerate>=1.15"],
        "demo": ["click>=8", "rich>=13", "einx>=0.3"],
        "test": [
            "build>=1.2",
            "click>=8",
            "einx>=0.3",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6",
            "ruff",
            "mypy>=2",
            "basedpyright>=1.40",
            "rich>=13",
            "setuptools>=77",
        ],
    },
    keywords=[
        "artificial intelligence",
        "attention",
        "context parallelism",
        "distributed training",
        "long context",
        "ring attention",
    ],
    classifiers=[
        "Development Status :: 5 - Production/Stable",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
)
