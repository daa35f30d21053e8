"""Small stand-in for nltk's data punkt_tab, which would be downloaded."""

from pathlib import Path

FILES = {
    "abbrev_types.txt": "dr\nmr\ne.g\ni.e\nu.s\np.s\nvs\n",
    "collocations.tab": "mr\tsmith\n",
    "sent_starters.txt": "however\nthe\n",
    "ortho_context.tab": "the\t110\nhowever\t42\ni\t34\n",
}


def write_punkt(folder: Path) -> Path:
    """Folder for nltk.data.path with the parameters of a sentence tokenizer of English."""
    made = folder / "tokenizers" / "punkt_tab" / "english"
    made.mkdir(parents=True)
    for name, text in FILES.items():
        (made / name).write_text(text, encoding="utf-8")
    return folder
