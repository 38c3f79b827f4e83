"""Finds objects in images and videos: python tools/infer.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("predict")
