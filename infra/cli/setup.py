"""Keys: one nkey a node and role, and the server's side of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.bus import BusClient
from infra.cli.common import (
    HomeOption,
    JsonOption,
    KeyOption,
    Refused,
    UrlOption,
    address,
    author,
    put,
    run,
    say,
    show_json,
    with_bus,
)  # fmt: skip
from infra.cli.operate import policy_text
from infra.keys import ensure_key, identity_of, keys_in, server_configuration
from infra.permissions import ROLES
from infra.pipeline import adopt
from infra.streams import check_server, ensure_streams
from processors import policy as policies


def register(app: typer.Typer) -> None:
    @app.command()
    def keys(
        folder: Annotated[Path, typer.Argument(help="Where the seeds are written, mode 0600")],
        node: Annotated[list[str] | None, typer.Option("--node", help="A node; may be repeated")] = None,
        role: Annotated[
            list[str] | None, typer.Option("--role", help=f"One of {', '.join(ROLES)}; may be repeated; none: all of them")
        ] = None,
        config: Annotated[
            Path | None, typer.Option("--config", help="Write the server's configuration here, for all keys of the folder")
        ] = None,
        json: JsonOption = False,
    ) -> None:
        """Make one nkey a node and role, each with the subjects that it may use. Keys that exist are kept."""
        wrong = [name for name in role or () if name not in ROLES]
        if wrong:
            raise Refused(f"there is no role {wrong[0]!r}; there are: {', '.join(ROLES)}")
        if "" in (node or ()):
            raise Refused("a node needs a name; give another --node")
        identities = [identity_of(role_name=name) for name in (role or (() if node else ROLES))]
        identities += [identity_of(node_name=name) for name in node or ()]
        try:
            made = [ensure_key(folder, identity) for identity in identities]
            if config is not None:
                there = {key.identity.user: key for key in (*keys_in(folder), *made)}
                config.write_text(server_configuration(list(there.values())), encoding="utf-8")
        except OSError as error:
            raise Refused(f"{error.filename or folder}: {error.strerror}; choose a folder that you may write to") from None
        if json:
            show_json(
                [
                    {
                        "user": k.identity.user,
                        "public_key": k.public_key,
                        "seed_file": str(k.seed_file),
                        "publish": list(k.identity.publish),
                        "subscribe": list(k.identity.subscribe),
                    }
                    for k in made
                ]
            )
            return
        for key in made:
            put(f"{key.identity.user}  {key.public_key}  {key.seed_file}")
        say(f"put the server's side into its configuration: {config}" if config else "see --config for the server's side")

    @app.command()
    def streams(
        replicas: Annotated[int, typer.Option("--replicas", min=1, max=5, help="Copies of each stream in a cluster")] = 1,
        policy: Annotated[Path | None, typer.Option("--policy", help="Policy file to adopt [default: observe everything]")] = None,
        home: HomeOption = None, url: UrlOption = "", key: KeyOption = "", json: JsonOption = False,
    ) -> None:  # fmt: skip
        """Make or verify the bus's streams, their ticks, and adopt a policy and the catalogue. Nothing is ever deleted."""

        async def work(nc: BusClient) -> None:
            await check_server(nc)
            await ensure_streams(nc, replicas)

        async def rules(nc: BusClient) -> bool:
            return await adopt(nc, text, author())

        where = address(home, url, key)
        text = policy_text(where.home, policy)
        run(with_bus(where, "admin", work))
        new = run(with_bus(where, "operator", rules))
        if json:
            show_json({"replicas": replicas, "policy": {"digest": policies.digest(text), "new": new}})
        else:
            say("the streams are as they should be, and the policy is adopted")
