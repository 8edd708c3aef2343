import{b as a}from"./chunk-JIU64FLM.js";import"./chunk-LSRSZYEX.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
