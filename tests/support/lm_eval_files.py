"""Shipped task files of lm-evaluation-harness with made-up records in the shape of their data sets, by what they need.

FILES: path below lm_eval/tasks -> function of (rng, number) that makes one record.
"""

import random
from collections.abc import Callable
from typing import Any

from tests.support.icl import some_sentence

Record = dict[str, Any]
Maker = Callable[[random.Random, int], Record]


def text(rng: random.Random, words: int = 5) -> str:
    return some_sentence(rng, rng.randint(max(words - 2, 1), words + 2))


def texts(rng: random.Random, count: int = 4, words: int = 2) -> list[str]:
    return [f"{text(rng, words)} {number}" for number in range(count)]  # all different


def record(classes: int | None = None, /, **columns: Any) -> Maker:
    """Maker of records. columns: "" for a text, a number n for one of 0..n-1, a list for one of it, or a function of rng.

    classes: their number, for a column `label`.
    """

    def make(rng: random.Random, number: int) -> Record:
        made: Record = {} if classes is None else {"label": rng.randrange(classes)}
        for name, kind in columns.items():
            if kind == "":
                made[name] = text(rng)
            elif isinstance(kind, int):
                made[name] = rng.randrange(kind)
            else:
                made[name] = rng.choice(kind) if isinstance(kind, list) else kind(rng)
        return made

    return make


def labelled(keys: str = "ABCD") -> Callable[[random.Random], Record]:
    return lambda rng: {"text": texts(rng, len(keys)), "label": [*keys]}


PAIR = {"sentence1": "", "sentence2": ""}
ABCD = {"question": "", **dict.fromkeys("ABCD", "")}
FOUR: Maker = record(question="", choices=texts, answer=4, subject="")
FIVE_CHOICES = {"question": "", "choices": lambda rng: texts(rng, 5), "answer": [*"ABCDE"]}
STORY = {f"input_sentence_{number}": "" for number in (1, 2, 3, 4)} | {"sentence_quiz1": "", "sentence_quiz2": ""}
BBH = record(input="", target=["True", "False", "(A)", "valid"])
MATH = {"question": "", "answer": lambda rng: f"{text(rng)} #### {rng.randrange(30)}", "answer_number": 30}


def truthful(rng: random.Random) -> Record:
    return {"choices": texts(rng, 3), "labels": [1, 0, 0]}


def schema(rng: random.Random, number: int) -> Record:
    pronoun = rng.choice(["they", "it"])
    before = text(rng, 6)
    return {
        "text": f"{before} because {pronoun} was {text(rng, 3).lower()}.",
        "pronoun": pronoun,
        "pronoun_loc": len(before) + len(" because "),
        "options": [f"The {one.lower()}" for one in texts(rng, 2)],
        "label": rng.randrange(2),
    }


def winogrande(rng: random.Random, number: int) -> Record:
    return {
        "sentence": f"{text(rng)} _ {text(rng, 3).lower()}.",
        "option1": text(rng, 2),
        "option2": text(rng, 2),
        "answer": rng.choice("12"),
    }


def targets(rng: random.Random, number: int) -> Record:
    """BIG-bench's records: one or several right answers."""
    some = texts(rng, 3)
    right = rng.randrange(3)
    return {
        "inputs": text(rng) + "?",
        "targets": [some[right]],
        "multiple_choice_targets": some,
        "multiple_choice_scores": [int(one == right) for one in range(3)],
    }


FILES: dict[str, Maker] = {
    # multiple_choice
    "arc/arc_easy.yaml": record(question="", choices=labelled(), answerKey=[*"ABCD"]),
    "openbookqa/openbookqa.yaml": record(question_stem="", choices=labelled(), answerKey=["A", " B", "C", "D"]),
    "piqa/piqa.yaml": record(2, goal="", sol1="", sol2=""),
    "sciq/sciq.yaml": record(
        support="", question="", distractor1="", distractor2="", distractor3="", correct_answer=""
    ),
    "super_glue/boolq/default.yaml": record(2, passage="", question=""),
    "super_glue/rte/default.yaml": record(2, premise="", hypothesis=""),
    "super_glue/wic/default.yaml": record(2, **PAIR, start1=lambda rng: 0, end1=lambda rng: 4),
    "super_glue/multirc/default.yaml": record(2, paragraph="", question="", answer=""),
    "glue/cola/default.yaml": record(2, sentence=""),
    "glue/mrpc/default.yaml": record(2, **PAIR),
    "glue/qnli/default.yaml": record(2, question="", sentence=""),
    "mmlu/default/mmlu_anatomy.yaml": FOUR,
    "mmlu/continuation/mmlu_anatomy.yaml": FOUR,
    "mmlu/flan_n_shot/loglikelihood/mmlu_abstract_algebra.yaml": FOUR,
    "truthfulqa/truthfulqa_mc1.yaml": record(question="", mc1_targets=truthful),
    "belebele/belebele_eng_Latn.yaml": record(
        flores_passage="", question="", **{f"mc_answer{i}": "" for i in (1, 2, 3, 4)}, correct_answer_num=[*"1234"]
    ),
    "xnli/xnli_en.yaml": record(3, premise="", hypothesis=""),
    "xstorycloze/default_en.yaml": record(**STORY, answer_right_ending=[1, 2]),
    "anli/anli_r1.yaml": record(3, premise="", hypothesis=""),
    "commonsense_qa/default.yaml": record(question="", choices=labelled("ABCDE"), answerKey=[*"ABCDE"]),
    "prost/corypaik_prost.yaml": record(4, context="", ex_question="", **dict.fromkeys("ABCD", "")),
    "headqa/headqa_en.yaml": record(
        qtext="", answers=lambda rng: [{"atext": one} for one in texts(rng)], ra=[1, 2, 3, 4]
    ),
    "swag/swag.yaml": record(4, startphrase="", **{f"ending{i}": "" for i in range(4)}),
    "cmmlu/cmmlu_agronomy.yaml": record(Question="", **dict.fromkeys("ABCD", ""), Answer=[*"ABCD"]),
    "ceval/ceval-valid_accountant.yaml": record(**ABCD, answer=[*"ABCD"]),
    "wmdp/wmdp_bio.yaml": FOUR,
    "blimp/wh_island.yaml": record(sentence_good="", sentence_bad=""),
    "hendrycks_ethics/deontology.yaml": record(2, scenario="", excuse=""),
    "french_bench/french_bench_grammar.yaml": record(
        question=lambda rng: f"{text(rng)} <...> {text(rng)}",
        **{f"answer{one}": "" for one in "ABCD"},
        answer=[*"ABCD"],
    ),
    "catalan_bench/catcola.yaml": record(Sentence="", Label=2),
    "turkishmmlu/config/Biology.yaml": record(**FIVE_CHOICES),
    "winogender/winogender.yaml": record(2, sentence="", pronoun=["she", "they"], occupation="", participant=""),
    "global_piqa/nonparallel_cloze/acm_arab.yaml": record(2, prompt="", solution0="", solution1=""),
    "inverse_scaling/inverse_scaling_hindsight_neglect.yaml": record(
        prompt="", classes=lambda rng: [" Yes", " No"], answer_index=2
    ),
    "evalita_llm/_evalita-mp_hs_p1.yaml": record(full_text="", hs=2),
    "bear/bear.yaml": record(text_options=texts, correct=4),
    # multiple_choice with code
    "hellaswag/hellaswag.yaml": record(
        ctx_a="", ctx_b="", activity_label="", endings=lambda rng: [f"[x] {one}" for one in texts(rng)], label=[*"0123"]
    ),
    "winogrande/default.yaml": winogrande,
    "super_glue/copa/default.yaml": record(
        2, premise=lambda rng: text(rng) + ".", question=["cause", "effect"], choice1="", choice2=""
    ),
    "super_glue/cb/default.yaml": record(3, premise="", hypothesis=""),
    "webqs/webqs.yaml": record(question="", answers=lambda rng: texts(rng, rng.randint(1, 3))),
    "wsc273/default.yaml": schema,
    "mutual/mutual.yaml": record(article="", options=texts, answers=[*"ABCD"]),
    "paws-x/paws_en.yaml": record(2, **PAIR),
    "pubmedqa/pubmedqa.yaml": record(CONTEXTS=texts, QUESTION="", final_decision=["yes", "no", "maybe"]),
    "bigbench/multiple_choice/abstract_narrative_understanding.yaml": targets,
    # loglikelihood
    "lambada/lambada_openai.yaml": record(text=""),
    "lambada_cloze/lambada_openai_cloze.yaml": record(text=""),
    "asdiv/default.yaml": record(body="", question="", answer=lambda rng: f"{rng.randrange(30)} (apples)"),
    "arithmetic/arithmetic_1dc.yaml": record(
        context=lambda rng: f"Q: {text(rng)}\n\nA:", completion=lambda rng: f" {rng.randrange(30)}"
    ),
    # loglikelihood_rolling
    "pile/pile_arxiv.yaml": record(text=lambda rng: text(rng, 60)),
    "french_bench/french_bench_opus_perplexity.yaml": record(text=lambda rng: text(rng, 20)),
    "wikitext/wikitext.yaml": record(page=lambda rng: f" = {text(rng)} = \n {text(rng, 30)} , 's @-@ ( {text(rng)} )"),
    # generate_until
    "arc/arc_challenge_chat.yaml": record(question="", choices=labelled(), answerKey=["A", "2", "C", "4"]),
    "super_glue/boolq/seq2seq.yaml": record(2, passage="", question=""),
    "mmlu/generative/mmlu_anatomy.yaml": FOUR,
    "mmlu/flan_n_shot/generative/mmlu_anatomy.yaml": FOUR,
    "mmlu/flan_cot_zeroshot/mmlu_anatomy.yaml": FOUR,
    "llama3/instruct/mmlu/mmlu_abstract_algebra.yaml": FOUR,
    "gsm8k/gsm8k.yaml": record(**MATH),
    "gsm8k/gsm8k-cot.yaml": record(**MATH),
    "mgsm/direct/mgsm_direct_en.yaml": record(**MATH),
    "afrimgsm/direct/prompt_1/afrimgsm_amh.yaml": record(**MATH),
    "asdiv/asdiv-cot-llama.yaml": record(body="", question="", answer=lambda rng: f"{rng.randrange(30)} (apples)"),
    "nq_open/nq_open.yaml": record(question="", answer=lambda rng: texts(rng, rng.randint(1, 3))),
    "triviaqa/default.yaml": record(question="", answer=lambda rng: {"aliases": texts(rng, rng.randint(1, 3))}),
    "babi/babi.yaml": record(passage="", question="", answer=["kitchen", "garden"]),
    "bbh/zeroshot/boolean_expressions.yaml": BBH,
    "bbh/fewshot/boolean_expressions.yaml": BBH,
    "bbh/cot_fewshot/boolean_expressions.yaml": BBH,
    "bigbench/generate_until/abstract_narrative_understanding.yaml": targets,
    "unscramble/anagrams1.yaml": record(context="", completion=""),
    "acpbench/mcq_cot_2shot/act_reach.yaml": record(context="", question="", answer=[*"ABCD"], choices=texts),
    "kmmlu/direct/kmmlu_direct_accounting.yaml": record(**ABCD, answer=[1, 2, 3, 4]),
    "fld/fld_default.yaml": record(prompt_serial="", world_assump_label=["PROVED", "DISPROVED", "UNKNOWN"]),
    "translation/wmt14_en-fr.yaml": record(translation=lambda rng: {"en": text(rng), "fr": text(rng)}),
    "basque_bench/flores_eu/flores_ca-eu.yaml": record(sentence_cat_Latn="", sentence_eus_Latn=""),
    "noreval/norrewrite-instruct/norrewrite_instruct.yaml": record(prompt="", context="", response=""),
    "japanese_leaderboard/ja_leaderboard_jaqket_v2.yaml": record(
        ctxs=lambda rng: {"text": texts(rng, 2)}, question="", answers=lambda rng: {"text": texts(rng, 1)}
    ),
    "turkishmmlu/config_cot/Biology.yaml": record(**FIVE_CHOICES),
}


def records(path: str, split: str, count: int) -> list[Record]:
    rng = random.Random(f"{path} {split}")
    return [FILES[path](rng, number) for number in range(count)]
