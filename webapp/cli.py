"""The `descant` command: serve the pages, or train one configuration without them."""

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import webbrowser
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_core.config_checks import ConfigError, validate
from trainer_core.formats import FORMATS, PRECISIONS
from trainer_core.run_dir import RunDir
from trainer_core.run_folders import RunFolders
from trainer_core.sources import SourceError
from webapp.settings import Settings, StartError, allowed_folders, default_home, listen, prepare_home
from webapp.supervisor import RunActive, start

if TYPE_CHECKING:
    import uvicorn


def main(arguments: list[str] | None = None) -> int:
    """Run the command; `descant` alone serves. Exit status 2 when it can't start."""
    if arguments is None:
        use_utf8()
    given = sys.argv[1:] if arguments is None else arguments
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")):
        given = ["serve", *given]
    parser = argparse.ArgumentParser(
        prog="descant",
        description="Train adapters for ACE-Step 1.5. Without a command it serves the pages: descant --port 9000.",
        epilog="The options of a command: descant serve --help, descant train --help, descant export --help.",
    )
    parser.add_argument("--version", action="version", version=f"descant {metadata.version('descant')}")
    commands = parser.add_subparsers(required=True)
    home = argparse.ArgumentParser(add_help=False)
    home.add_argument("--home", type=Path, default=default_home(), help="where runs are kept (%(default)s)")

    serve_parser = commands.add_parser("serve", parents=[home], help="serve the pages (what descant alone does)")
    serve_parser.add_argument(
        "--host",
        default=Settings.host,
        help="where to listen; any but a loopback address needs a key (%(default)s)",
    )
    serve_parser.add_argument("--port", type=port, default=Settings.port, help="(%(default)s)")
    serve_parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what everybody has to sign in with; others on this machine can see it in the list of processes, so "
        "better set it as DESCANT_API_KEY",
    )
    serve_parser.add_argument(
        "--allow",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder for models, data sets and adapters, beside the home; without this option all folders on a "
        "loopback address, none elsewhere",
    )
    serve_parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which a reverse proxy on this machine passes Descant on; needs a key",
    )
    serve_parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    serve_parser.set_defaults(command=serve)

    train_parser = commands.add_parser("train", parents=[home], help="train a configuration in this terminal")
    train_parser.add_argument("config", type=Path, metavar="CONFIG.json", help="a run's settings")
    train_parser.set_defaults(command=train)

    export_parser = commands.add_parser("export", help="write a checkpoint as a file for another program")
    export_parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, such as RUN/checkpoints/step-000160"
    )
    for option, allowed in (("format", FORMATS), ("precision", PRECISIONS)):
        export_parser.add_argument(
            f"--{option}", choices=allowed, default=next(iter(allowed)), help="as on the page (%(default)s)"
        )
    export_parser.add_argument(
        "--output", type=Path, metavar="PATH", help="a file or folder (here, named after the run)"
    )
    export_parser.set_defaults(command=export)

    options = parser.parse_args(given)
    try:
        status = options.command(options)
    except StartError as error:
        print(f"descant: {error}", file=sys.stderr)
        return 2
    assert isinstance(status, int)
    return status


def use_utf8() -> None:
    """Take and print names in any language, whatever the locale is set to."""
    if sys.getfilesystemencoding() != "utf-8":  # fixed once Python has started
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def port(text: str) -> int:
    """A port number; 0 lets the system choose one."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} was given; a port is a whole number from 0 to 65535")
    return number


def serve(options: argparse.Namespace) -> int:
    """Serve the pages until interrupted. Runs go on by themselves."""
    # Taken out of the environment, which trainers inherit.
    environment_key = os.environ.pop("DESCANT_API_KEY", None)
    settings = Settings(
        prepare_home(options.home),
        options.host,
        options.port,
        environment_key if options.api_key is None else options.api_key,
        tuple(options.allow_host),
        allowed_folders(options.allow),
    )
    listening = listen(settings.host, settings.port)
    settings = replace(settings, port=listening.getsockname()[1])

    import uvicorn

    who = ", for whoever has the key" if settings.api_key else ""
    print(f"Descant is at {settings.address}{who}  (runs are kept in {settings.home}; stop with Ctrl-C)", flush=True)
    if not options.no_open and has_browser():
        webbrowser.open(settings.address)  # the socket listens already, so the browser only waits
    end_by_exit()
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(server_config(settings)).run(sockets=[listening])
    return 0


def server_config(settings: Settings) -> "uvicorn.Config":
    """How the pages are served."""
    import uvicorn

    from webapp.app import make_app
    from webapp.live import PING_SECONDS

    return uvicorn.Config(
        make_app(settings),
        log_level="warning",
        timeout_graceful_shutdown=1,
        # Without a proxy anybody could claim another address in its headers and guess the key unslowed.
        proxy_headers=bool(settings.proxy_names),
        ws="websockets-sansio",
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,  # work for the processor, and nothing is short of room on this machine
    )


def end_by_exit() -> None:
    """Let a request to end the process (SIGTERM) tidy up its temporary files; by itself it would not."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def has_browser() -> bool:
    """Whether a graphical browser can be opened; without a screen Python would start one in the terminal."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


def train(options: argparse.Namespace) -> int:
    """Train in the foreground, in the same kind of run folder."""
    try:
        data = json.loads(options.config.read_text(encoding="utf-8"))
        config = validate(data if isinstance(data, dict) else {"config": data})
    except ConfigError as error:
        problems = "\n".join(f"  {name}: {message}" for name, message in error.fields.items())
        raise StartError(f"{options.config} can't be used:\n{problems}") from error
    except OSError as error:
        raise StartError(f"{options.config} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise StartError(f"{options.config} is not valid JSON: {error}.") from error
    from webapp import terminal

    try:
        trainer = start(RunFolders(prepare_home(options.home)), config)
    except RunActive as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"The run can't be started: {error}.") from error
    except KeyboardInterrupt:
        print("descant: interrupted before the run began", file=sys.stderr)
        return 130
    return terminal.follow(trainer)


def export(options: argparse.Namespace) -> int:
    """Write a checkpoint as a file for another program, and say what is in it."""
    from trainer_core import exports

    end_by_exit()
    checkpoint: Path = options.checkpoint.expanduser().absolute()
    output: Path = options.output or Path()
    try:
        if output.is_dir():
            run = str(RunDir(checkpoint.parent.parent).settings().get("name", ""))
            output /= exports.file_name(run, checkpoint.name, options.format, options.precision)
        if output.exists():
            raise StartError(f"{output} is there already. Remove it, or give another --output.")
        tensors = exports.export(checkpoint, options.format, options.precision, output)
    except SourceError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"{output} can't be written: {error.strerror or error}.") from error
    except KeyboardInterrupt:
        print("descant: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"{output}: {tensors} tensors, {output.stat().st_size:,} bytes, {options.format}, {options.precision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
