"""Frequent English words that no attack changes: NLTK's list of English stop words.

The words are copied here because NLTK's corpus would have to be downloaded. TextAttack, and PromptBench with it,
excludes the same words.
"""

from __future__ import annotations

__all__ = ["STOP_WORDS"]

# Parts of contractions, such as "t" and "ll", are words of the list.
STOP_WORDS = frozenset(
    """
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it
    its itself they them their theirs themselves what which who whom this that these those am is are was were be been
    being have has had having do does did doing a an the and but if or because as until while of at by for with about
    against between into through during before after above below to from up down in out on off over under again further
    then once here there when where why how all any both each few more most other some such no nor not only own same so
    than too very s t can will just don should now d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma
    mightn mustn needn shan shouldn wasn weren won wouldn
    you're you've you'll you'd she's it's that'll don't should've aren't couldn't didn't doesn't hadn't hasn't haven't
    isn't mightn't mustn't needn't shan't shouldn't wasn't weren't won't wouldn't
    """.split()  # noqa: SIM905  (easier to compare with the corpus)
)
