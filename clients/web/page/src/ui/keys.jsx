/** The list of keyboard shortcuts. */

import { panels } from "../model/app.js";
import { t } from "../strings.js";
import { Dialog } from "./dialogs.jsx";

const groups = () => [
  [t.keysEverywhere, [
    [t.doCommands, [t.ctrl, "K"]], [t.newChat, [t.ctrl, t.shift, "O"]], [t.doInput, ["/"]], [t.showTree, ["Alt", "T"]], [t.showSidebar, [t.ctrl, "B"]],
    [t.settings, [t.ctrl, ","]], [t.doStop, ["Esc"]], [t.doKeys, ["?"]],
  ]],
  [t.keysMessage, [[t.doSend, [t.enter]], [t.doNewLine, [t.shift, t.enter]], [t.doEditLast, ["↑"]]]],
  [t.keysTree, [[t.doWalkTree, ["↑", "↓", "←", "→"]], [t.doEnds, [t.home, t.end]], [t.doShow, [t.enter]], [t.doDelete, [t.del]]]],
  [t.keysDrafts, [[t.doWalkDrafts, ["←", "→"]], [t.doKeep, [t.enter]]]],
];

export function KeysDialog() {
  const close = () => { panels.keys.value = false; };
  return (
    <Dialog open={panels.keys.value} close={close} title={t.keyboard} reading>
      <div class="keys">
        {groups().map(([name, rows]) => (
          <section key={name}>
            <h3>{name}</h3>
            <dl>{rows.map(([does, keys]) => <div key={does}><dt>{does}</dt><dd>{keys.map((key) => <kbd key={key}>{key}</kbd>)}</dd></div>)}</dl>
          </section>
        ))}
      </div>
      <div class="buttons"><button type="button" class="primary" onClick={close}>{t.done}</button></div>
    </Dialog>
  );
}
