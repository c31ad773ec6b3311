"""The form of a chat template is found or unknown, and never another."""

import pytest

from tests.tools.templates import STRANGE, TEMPLATES, template
from vmmkv_server.tools.forms import NAMES, form_named, form_of, shown_by
from vmmkv_server.tools.forms.plain import PlainJson


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_form(name: str) -> None:
    form = form_of(TEMPLATES[name])
    assert form is not None and form.name == name and name in NAMES


@pytest.mark.parametrize("name", STRANGE)
def test_a_template_that_shows_no_form_is_unknown(name: str) -> None:
    assert form_of(STRANGE[name]) is None


@pytest.mark.parametrize(
    ("written", "are_text"), [("arguments", True), ("arguments | string", True), ("arguments | tojson", False)]
)
def test_a_template_that_takes_arguments_as_text_is_told_from_one_that_takes_objects(written: str, are_text: bool) -> None:
    """As text, `tojson` would write a text of JSON; as objects, `string` writes Python."""
    begin = """{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function."""
    shown = shown_by(template(f"{begin}{written}) }}}}}}</tool_call>"))
    assert shown.are_arguments_text == are_text and shown.form is not None


def test_a_form_can_be_named_and_an_unknown_name_tells_the_known_ones() -> None:
    for name in NAMES:
        assert form_named(name, None).name == name
    assert form_named("json", TEMPLATES["json"]) is form_of(TEMPLATES["json"])
    with pytest.raises(ValueError, match="'herms'; there are hermes,"):
        form_named("herms", None)


def test_plain_json_tells_of_tools_where_the_template_has_room_for_it() -> None:
    without_system = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"
    )
    for text, has_system in ((TEMPLATES["json"], True), (without_system, False)):
        form = form_of(text)
        assert isinstance(form, PlainJson) and form.has_system == has_system
