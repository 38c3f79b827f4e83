"""Prints what makes a shell complete `ppdist`: commands, options, names of configs.

ppdist completion bash     for ~/.bashrc: eval "$(ppdist completion bash)"
ppdist completion zsh      for ~/.zshrc:  eval "$(ppdist completion zsh)"
"""

import argcomplete

from ppdist.cli import parser_of


def main() -> None:
    parser = parser_of("completion", __doc__)
    parser.add_argument("shell", choices=["bash", "zsh"])
    print(argcomplete.shellcode(["ppdist"], True, parser.parse_args().shell))
