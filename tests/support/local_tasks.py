"""Small tasks of the LM Evaluation Harness as local files: nothing is fetched."""

import json
import pathlib

NAMES = ["local_choice", "local_rolling", "local_generation"]
CHOICES = [
    ("Mr. Darcy was", ["proud", "not at all proud", "a rather long answer that nobody would give"], 0),
    ("It is a truth universally acknowledged, that a single man", ["in want of a wife", "is", "dances"], 0),
    ("", ["A text without a question", "Another one"], 1),
    ("She walked ", ["home", "to the house of her friend"], 0),  # the space belongs to the answer
    ("word " * 120, ["more than the model sees", "x"], 1),
]
ROLLING = ["x", "Emma Woodhouse, handsome, clever, and rich. " * 9, "A shorter text — of one window."]
GENERATION = [("It is a truth", " universally"), ("Emma", ""), ("He said: " * 40, ""), ("\n", "the")]
YAML = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "local_generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["ou", "."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: pathlib.Path) -> None:
    """Writes the tasks NAMES and their documents into a folder."""
    documents = {
        "local_choice": [{"question": q, "choices": c, "label": label} for q, c, label in CHOICES],
        "local_rolling": [{"text": text} for text in ROLLING],
        "local_generation": [{"question": question, "answer": answer} for question, answer in GENERATION],
    }
    for name, rows in documents.items():
        data = folder / f"{name}.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        where = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(where)}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"{head}fewshot_split: test\n{YAML[name].strip()}\n")
