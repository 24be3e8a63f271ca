"use strict";
const { lines, wheels } = JSON.parse(document.getElementById("data").textContent);
const form = document.querySelector("form"), code = document.getElementById("lines");
const status = document.getElementById("status"), copy = document.getElementById("copy");
// Each is offered for those before it. A wheel is [torch, CUDA, platform, Python, channel, version, file, sha256].
const dimensions = ["torch", "cuda", "platform", "python"];
const root = new URL(".", location.href.split("#")[0].split("?")[0]);

const chosen = (name) => form.elements[name].value;

function choose(name, value) {
  for (const radio of form.querySelectorAll(`[name="${name}"]`)) {
    if (radio.value === value && !radio.disabled) radio.checked = true;
  }
}

// Offers only what exists, and moves a choice that does not to the first that does.
function narrow() {
  let left = wheels;
  const moved = [];
  dimensions.forEach((name, at) => {
    const there = new Set(left.map((wheel) => wheel[at])), before = chosen(name);
    const radios = [...form.querySelectorAll(`[name="${name}"]`)];
    for (const radio of radios) radio.disabled = !there.has(radio.value);
    if (!there.has(before)) {
      radios.find((radio) => !radio.disabled).checked = true;
      moved.push(`${before} is not built for that: ${chosen(name)} instead.`);
    }
    left = left.filter((wheel) => wheel[at] === chosen(name));
  });
  return [left[0], moved];
}

function show() {
  const [[torch, cuda, platform, python, path, version, file, sha256], moved] = narrow();
  const channel = new URL(path, root).href;
  const wheel = new URL(file, `${channel}scaled-mask-softmax/`).href;
  const values = { torch, cuda, platform, python, channel, version, wheel, sha256 };
  code.textContent = lines[chosen("tool")].replace(/\{(\w+)\}/g, (_, name) => values[name]);
  status.textContent = moved.join(" ");
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  narrow();
  for (const name of [...dimensions, "tool"]) {
    if (asked.has(name)) {
      choose(name, asked.get(name));
      narrow();
    }
  }
  show();
}

form.addEventListener("change", () => {
  show();
  const now = new URLSearchParams([...dimensions, "tool"].map((name) => [name, chosen(name)]));
  history.replaceState(null, "", `#${now}`);
});

copy.addEventListener("click", async () => {
  let done = false;
  try {
    await navigator.clipboard.writeText(code.textContent);
    done = true;
  } catch {
    // No such clipboard on a page from a file or without TLS.
    getSelection().selectAllChildren(code);
    done = document.execCommand("copy");
  }
  status.textContent = done ? "Copied." : "Selected: press Ctrl+C to copy.";
});

for (const code of document.querySelectorAll("[data-lines]")) {
  code.textContent = code.dataset.lines.replaceAll("{index}", root.href);
}
addEventListener("hashchange", fromAddress);
document.getElementById("selector").hidden = false;
fromAddress();
