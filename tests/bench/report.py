"""Table and page from the results (JSON as scripts/bench writes it)."""
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def number(v):
    return f"{v:.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.2f}"


def cells_of(row):
    spread = " ".join(number(row[k]) if k in row else "" for k in ("p90", "p99")).split()
    if "interval" in row:
        spread = [f"{row['interval'][0]:.2f}..{row['interval'][1]:.2f}"]
    limit = ""
    if row.get("limit") is not None:
        sign = ">=" if row.get("at_least") else "<="
        limit = f"{sign} {row['limit']:g}: {'met' if row['met'] else 'NOT MET'}"
    return [row["line"], row["what"], f"{number(row['p50'])} {row['unit']}", " / ".join(spread), str(row["n"]), limit]


HEAD = ["line", "what", "p50", "p90 / p99", "n", "bar"]


def table(rows):
    lines = [HEAD, ["---"] * 2 + ["---:"] * 3 + ["---"]] + [cells_of(r) for r in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows):
    lines = [HEAD] + [cells_of(r) for r in rows]
    width = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, width)).rstrip() for line in lines)


def facts(result):
    m, v = result["machine"], result["versions"]
    return (f"{m['cpu']}, {m['cores']} cores, {m['memory_gb']:.0f} GB, Linux {m['kernel']}, "
            f"{m['busy_before'] * 100:.0f} % busy before the run; QEMU {v['qemu']} (TCG), cellvisor {v['cellvisor']}, "
            f"jupyter_kernel_gateway {v['jupyter_kernel_gateway']}, ipykernel {v['ipykernel']}, "
            f"Python {v['python']}; {result['when']}")


def page(text, result):
    """The page with the part between the marks made anew."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{facts(result)}\n\n{table(result['rows'])}\n{END}{tail}"
