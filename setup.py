"""Package metadata.  Tool settings (ruff, mypy, pytest) live in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# Both as in ppdist/__init__.py.
if sys.platform == "win32":
    sys.exit("ppdist needs Linux.  On Windows, use it in WSL2: docs/start.md, Windows and macOS")
# pip looks at python_requires only after all dependencies.
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"ppdist needs Python 3.10 to 3.13, and this is {sys.version.split()[0]}")

HERE = Path(__file__).parent

FAST = ["hotcoco>=1.3,<2"]  # COCO's numbers many times faster than pycocotools

# The converter has no wheels for Python 3.13; its tests skip there.
ONNX = [
    "paddle2onnx==2.1.0; python_version < '3.13'",
    "onnx>=1.17; python_version < '3.13'",
    "onnxruntime>=1.17",
    "ml_dtypes>=0.5",  # onnxruntime.quantization imports it
]


class BuildWithConfigs(build_py):
    """Puts configs/ into the package: `ppdist train -c NAME` finds them from any folder."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "ppdist" / "configs"
            shutil.copytree(HERE / "configs", target, dirs_exist_ok=True)


# Paddle is not in install_requires: a user's paddlepaddle-gpu has another distribution name, and
# naming the CPU wheel here would install it over theirs.  `pip install ppdist[cpu]` brings the CPU
# wheel; without any Paddle every tool stops with one line that says what to install.
setup(
    name="ppdist",
    version="0.1.0",
    description="Distributed object-detector training on PaddlePaddle fleet",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.10,<3.14",
    cmdclass={"build_py": BuildWithConfigs},
    packages=find_packages(include=["ppdist", "ppdist.*"]),
    package_data={
        "ppdist": ["py.typed"],
        "ppdist.report": ["templates/*"],
        "ppdist.config": ["migration.yml"],
        "ppdist.models": ["zoo.yml", "figures.yml"],
    },
    install_requires=[
        "numpy>=1.26",
        "pillow>=10.3",
        "opencv-python-headless>=4.11",
        "pyyaml>=6.0",
        "pydantic>=2.6",
        "msgspec>=0.20",  # COCO files of hundreds of megabytes
        "pycocotools>=2.0.8",  # mAP
        "safetensors>=0.6",
        "scipy>=1.11",  # Hungarian matching of RT-DETR and D-FINE
        "rich>=13",
        "visualdl>=2.5.3",
        "matplotlib>=3.8",
        "jinja2>=3.1.6",  # tools/report.py; VisualDL needs it, too
        "protobuf>=5.29.6,<7",  # fleet.init of Paddle 3.2.2 to 3.3.0 fails with protobuf 7
    ],
    extras_require={
        "cpu": ["paddlepaddle>=3.2.2", *FAST],  # of a newer one than README.md lists runs warn
        "fast": FAST,
        "onnx": ONNX,
        "openvino": ["openvino>=2025.0"],  # runs ONNX files; see docs/deploy.md
        "tensorboard": [
            "tensorboardX>=2.6.4",
            "tensorboard>=2.16",
        ],  # log.trackers: [tensorboard], and its viewer
        "wandb": ["wandb>=0.20"],  # log.trackers, as the next two
        "mlflow": ["mlflow-skinny>=3"],
        "swanlab": ["swanlab>=0.10"],
        "stores": ["fsspec>=2025.2", "s3fs>=2025.2"],  # data and runs in s3://, gs://, ...
        "monitoring": ["prometheus-client>=0.20"],  # --metrics_port
        "jpeg": ["simplejpeg>=1.9"],  # decodes JPEGs to the same pixels in less time
        "docs": ["mkdocs-material>=9.5"],  # make site
        "track": ["trackers>=2.6"],  # ppdist predict --track; brings supervision and opencv-python
        "tune": ["optuna>=4.4"],  # tools/tune.py
        "serving": [  # deploy/serving
            "fastapi>=0.121",
            "starlette>=0.49.1",
            "uvicorn>=0.30",
            "httptools>=0.6.4",
            "python-multipart>=0.0.27",
            "prometheus-client>=0.20",
        ],
        "dev": [
            *FAST,
            "pytest>=8",
            "pytest-xdist>=3.5",
            "prometheus-client>=0.20",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "types-PyYAML",
            "tensorboardX>=2.6.4",
            *ONNX,
            "openvino>=2025.0",
            "fastapi>=0.121",
            "starlette>=0.49.1",
            "uvicorn>=0.30",
            "httptools>=0.6.4",
            "python-multipart>=0.0.27",
            "httpx>=0.27",
            "optuna>=4.4",
            "s3fs>=2025.2",
            "moto[server]>=5",  # an S3 server on loopback
            "simplejpeg>=1.9",
            "mkdocs-material>=9.5",
            "setuptools>=70.1",  # builds the wheel that tests install
        ],
    },
    entry_points={
        "console_scripts": [
            "ppdist = ppdist.__main__:main",
            "fleetrun = ppdist.launch.cli:main",  # Paddle installs one, too: see README.md
        ]
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Image Recognition",
    ],
)
