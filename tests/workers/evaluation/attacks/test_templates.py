import pytest

from workers.evaluation.attacks.stop_words import STOP_WORDS
from workers.evaluation.attacks.templates import Template

SST2 = "Decide whether this review is 'positive' or 'negative'.\nReview: {{sentence}}\nAnswer:"


def changeable(text: str, *labels: str) -> list[str]:
    template = Template.of(text, labels=labels)
    return [template.pieces[index].text for index in template.words]


@pytest.mark.parametrize(
    "text",
    [
        SST2,
        "",
        "{{a}}",
        "no placeholder",
        "{% if a %}Yes, {{ a | replace('}}', \"{{\") }}{% endif %} end",
        "{# a note #}Rate it-self: {% raw %}{{not one}}{% endraw %} caf\u00e9\n",
    ],
)
def test_pieces_are_the_template(text: str) -> None:
    """The texts of the pieces together are the template, character by character."""
    assert Template.of(text, labels=["a"]).text == text


def test_placeholders_are_never_words() -> None:
    """No word of an expression, statement, comment or raw block of Jinja can be changed."""
    text = "Judge {{ text | replace('}} x', 'word') }}{# remark #} {% raw %}{{inner}}{% endraw %}"
    assert changeable(f"{{% if kind %}}{text}{{% endif %}}end") == ["Judge", "end"]


def test_labels_and_stop_words_are_protected() -> None:
    """Labels are protected as whole words in upper or lower case, also in quotes; stop words are too."""
    assert changeable(SST2, "Positive", "negative") == ["Decide", "whether", "review", "Review", "Answer"]
    assert changeable("positively POSITIVE not_positive", "positive") == ["positively"]
    assert changeable("say not entailment, or entailment alone", "not entailment") == ["say", "entailment", "alone"]


def test_a_template_without_protection_has_all_words() -> None:
    """The words that protection removes are words otherwise, so the test above can fail."""
    assert {"positive", "negative"} <= set(changeable(SST2))
    assert len(STOP_WORDS) == 179


def test_a_word_is_replaced_in_its_place() -> None:
    """Only the chosen occurrence of a word changes."""
    template = Template.of("Review the review: {{text}}")
    second = template.words[1]
    assert template.with_word(second, "memo").text == "Review the memo: {{text}}"


@pytest.mark.parametrize(
    ("text", "attacked"),
    [
        (SST2, SST2.replace("Answer:", "Answer so it is :")),
        ("{{text}}\nGood?", "{{text}}\nGood so it is ?"),
        ("Rate: {{text}}", "Rate: {{text}} so it is"),
        ("", "so it is"),
    ],
)
def test_sentences_go_to_the_end(text: str, attacked: str) -> None:
    """A sentence follows the last word or placeholder; punctuation stays at the end."""
    assert Template.of(text).with_sentence("so it is").text == attacked


def test_models_read_placeholders_as_content() -> None:
    """The place of a word in the text that fill-mask models read is that of the word itself."""
    template = Template.of("{% if a %}Rate {{ text }} well{% endif %}")
    text = template.read()
    assert text == "Rate {content} well"
    assert [text[slice(*template.span(index))] for index in template.words] == ["Rate", "well"]
