// What the pages do beyond what they do without JavaScript: they refresh themselves, and plots
// say what lies under the pointer.
"use strict";

(() => {
  // Refreshing: the page is fetched again and its content replaced, unless somebody is using it.
  const seconds = Number(document.querySelector("main")?.dataset.refresh || 0);

  const busy = () => {
    const main = document.querySelector("main");
    const active = document.activeElement;
    return (
      document.hidden ||
      (active && active !== main && main.contains(active)) ||
      main.matches(":has(.tip)") ||
      !(getSelection()?.isCollapsed ?? true)
    );
  };

  const refresh = async () => {
    if (busy()) return;
    const answer = await fetch(location.href, { headers: { "x-refresh": "1" } });
    if (!answer.ok || busy()) return;
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = found.querySelector("main");
    const old = document.querySelector("main");
    if (!fresh) return;
    for (const open of old.querySelectorAll("details[open][id]")) {
      const same = fresh.querySelector(`#${CSS.escape(open.id)}`);
      if (same) same.open = true;
    }
    const scrolled = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    old.replaceChildren(...fresh.childNodes);
    [...old.querySelectorAll(".scroll")].forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
    document.querySelector("footer").replaceChildren(...found.querySelector("footer").childNodes);
  };

  if (seconds) {
    const loop = async () => {
      try { await refresh(); } catch { /* the next one may find it again */ }
      setTimeout(loop, seconds * 1000);
    };
    setTimeout(loop, seconds * 1000);
  }

  // Plots: the nearest point under the pointer, in words.
  const clear = () => document.querySelectorAll(".tip, .cursor").forEach((one) => one.remove());

  document.addEventListener("pointermove", (event) => {
    const field = event.target.closest?.(".field");
    clear();
    if (!field) return;
    const points = JSON.parse(field.closest("[data-points]").dataset.points || "[]");
    const span = Number(field.closest("[data-seconds]")?.dataset.seconds || 0);
    const end = Number(field.closest("[data-end]")?.dataset.end || 0);
    if (!points.length || !span) return;
    const box = field.getBoundingClientRect();
    const wanted = end - span * (1 - (event.clientX - box.left) / box.width);
    const near = points.reduce((a, b) =>
      Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a);
    const x = 1 - (end - near[0]) / span;
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    cursor.style.left = `${100 * x}%`;
    const tip = document.createElement("div");
    tip.className = "tip";
    const when = new Date(near[0] * 1000);
    tip.textContent = `${when.toLocaleString([], { dateStyle: span > 90000 ? "short" : undefined, timeStyle: "short" })} · `
      + near[1].map(([name, value]) => `${name} ${value}`).join(" · ");
    field.append(cursor, tip);
    const half = tip.offsetWidth / 2;
    tip.style.left = `${Math.min(Math.max(x * box.width, half), Math.max(half, box.width - half))}px`;
  });
  document.addEventListener("pointerleave", clear);

  // Configure: what is typed is checked as it is typed, and the lines that would change are shown.
  const form = document.querySelector("form[data-check]");
  if (form) {
    const review = form.querySelector(".review");
    const save = form.querySelector(".save-button");
    form.classList.add("js");
    form.querySelector(".review-button").hidden = true;
    let timer = 0;
    let latest = 0;

    const pill = (restart) => {
      const made = document.createElement("span");
      made.className = `pill ${restart ? "warn" : "good"}`;
      const sign = document.createElement("span");
      sign.className = "sign";
      sign.ariaHidden = "true";
      sign.textContent = restart ? "!" : "✓";
      made.append(sign, restart ? "restart required" : "applied at once");
      return made;
    };

    const show = (found) => {
      for (const row of form.querySelectorAll("[data-field]")) {
        const said = found.problems[row.dataset.field] || "";
        row.classList.toggle("invalid", Boolean(said));
        row.querySelector(".problem").textContent = said;
        row.querySelector("input, select").ariaInvalid = said ? "true" : null;
      }
      form.querySelector(".general").textContent = found.problems[""] || "";
      form.querySelector(".changes").replaceChildren(...found.changes.map((one) => {
        const item = document.createElement("li");
        const key = document.createElement("code");
        key.textContent = one.key;
        const values = document.createElement("span");
        const value = document.createElement("b");
        value.textContent = one.new || "default";
        values.append(`${one.old || "default"} → `, value);
        item.append(key, " ", values, " ", pill(one.restart));
        return item;
      }));
      form.querySelector(".diff").replaceChildren(...found.diff.map((line) => {
        const made = document.createElement("span");
        made.className = { "+": "added", "-": "removed", "@": "place" }[line[0]] || "same";
        made.textContent = `${line}\n`;
        return made;
      }));
      const wrong = Object.keys(found.problems).length > 0;
      review.classList.toggle("idle", !found.changes.length && !wrong);
      save.hidden = !found.changes.length || wrong;
    };

    const check = async () => {
      const mine = ++latest;
      const values = {};
      for (const [name, value] of new FormData(form)) {
        if (!["csrf", "token", "action"].includes(name)) values[name] = value;
      }
      const answer = await fetch("/api/configure/check", {
        method: "POST",
        headers: { "content-type": "application/json", "x-csrf-token": form.elements.csrf.value },
        body: JSON.stringify({ values, token: form.elements.token.value }),
      });
      const found = await answer.json();
      if (mine !== latest) return;
      if (answer.ok) show(found);
      else form.querySelector(".general").textContent = found.error.message;
    };

    const soon = () => {
      clearTimeout(timer);
      timer = setTimeout(() => check().catch(() => {}), 250);
    };
    form.addEventListener("input", soon);
    form.addEventListener("change", soon);
    // Enter in a field must not save what nobody has looked at.
    form.addEventListener("submit", (event) => {
      if (event.submitter?.value !== "save" || save.hidden) {
        event.preventDefault();
        soon();
      }
    });
  }
})();
