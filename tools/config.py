"""Shows a resolved configuration, or regenerates docs and schema: python tools/config.py --help"""

from ppdist import cli

if __name__ == "__main__":
    cli.run("config")
