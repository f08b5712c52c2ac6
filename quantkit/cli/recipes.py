"""`quantkit recipes`: lists or prints the recipes that are shipped."""

from typing import Annotated, Optional

import typer

from quantkit.cli import options as opt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("recipes")(recipes)


def recipes(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[NAME]", help="Print this recipe."),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """List the recipes, or print one as YAML.

    Example: quantkit recipes glm-5.2
    """
    from dataclasses import asdict

    from quantkit import __version__
    from quantkit.cli import render
    from quantkit.recipe_files import recipe_summaries, recipe_text

    head = {"command": "recipes", "version": __version__, "status": "ok"}
    if name is not None:
        text = recipe_text(name)
        if not as_json:
            render.show_line(text.rstrip())
            return
        from quantkit.recipe import builtin_recipe, recipe_document

        render.show_json({**head, "recipe": recipe_document(builtin_recipe(name))})
        return
    summaries = recipe_summaries()
    if as_json:
        render.show_json({**head, "recipes": [asdict(summary) for summary in summaries]})
        return
    rows = [
        [summary.name, summary.hub_id, summary.family, str(summary.group_size), summary.description]
        for summary in summaries
    ]
    render.show_table("Recipes", ["name", "source", "family", "group", "description"], rows)
