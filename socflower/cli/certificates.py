"""`socflower certificates`: a private certificate authority, and a certificate and a key for each host."""

from pathlib import Path
from typing import Annotated

import typer

from socflower.cli.options import Json
from socflower.cli.terminal import print_json, print_line


def certificates(
    hosts: Annotated[
        list[str],
        typer.Argument(
            help="DNS names or IP addresses, as the hosts' peers dial them.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the authority and of all hosts' files; hosts are added to one "
            "that is there.",
            show_default=False,
        ),
    ],
    valid_days: Annotated[
        int, typer.Option(help="How long the hosts' certificates are valid.")
    ] = 825,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Replace keys and certificates that the hosts have already."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a private certificate authority, and for each host a certificate and a key, for rings with mutual TLS."""
    from socflower.wire.certificates import write_certificates

    written = write_certificates(out, hosts, valid_days=valid_days, renew=renew).values()
    if as_json:
        print_json(
            {
                "schema": 1,
                "folder": str(out.absolute()),
                "hosts": [
                    {
                        "host": one.host,
                        "status": one.status,
                        "ca": str(one.ca),
                        "certificate": str(one.certificate),
                        "key": str(one.key),
                        "not_after": one.not_after.isoformat(),
                        "node_config": one.node_config,
                    }
                    for one in written
                ],
            }
        )
        return
    for one in written:
        print_line(f"{one.host} ({one.status}, until {one.not_after:%Y-%m-%d}): {one.node_config}")
    print_line(
        f"Copy its three files to each host, and keep {out.absolute() / 'ca.key'} off all of them: it signs new "
        "hosts."
    )
