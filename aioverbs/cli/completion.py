"""`aioverbs completion`: print the completion script of a shell."""

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

_INSTALL = {
    "bash": 'eval "$(aioverbs completion bash)"            in ~/.bashrc',
    "zsh": 'eval "$(aioverbs completion zsh)"             in ~/.zshrc, after compinit',
    "fish": "aioverbs completion fish | source              in ~/.config/fish/config.fish",
}


@click.command(short_help="Print the completion script of a shell.", epilog="\b\n" + "\n".join(_INSTALL.values()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and device names."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "aioverbs", "_AIOVERBS_COMPLETE").source())
