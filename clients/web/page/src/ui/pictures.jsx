/** Pictures of a message: small, and large at a press. */

import { useState } from "preact/hooks";
import { urlOf } from "../model/pictures.js";
import { t } from "../strings.js";

export function Pictures({ files = [] }) {
  const pictures = files.filter(({ picture }) => picture);
  if (!pictures.length) return null;
  return <div class="pictures">{pictures.map((file, i) => <Picture key={i} file={file} />)}</div>;
}

function Picture({ file }) {
  const [large, setLarge] = useState(false);
  return (
    <button type="button" class={`picture${large ? " large" : ""}`} aria-expanded={large} title={large ? t.showSmall : t.showLarge} onClick={() => setLarge(!large)}>
      <img src={urlOf(file)} alt={t.pictureNamed(file.name)} />
    </button>
  );
}
